#include "cli/registry/model_verify.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/sha256.h"
#include "cli/registry/model_files.h"
#include "engine/loaded_model.h"
#include "terminal/report.h"
#include "text/shown.h"
#include "weights/checkpoint_files.h"
#include "weights/gguf/gguf.h"
#include "weights/kt/kt_folder.h"
#include "weights/safetensors.h"

namespace kt {
namespace {

namespace fs = std::filesystem;

// A file and what it should hash to.
struct Expected {
  std::string path;
  uint64_t bytes = 0;
  std::string sha256;
};

bool is_sha256(std::string_view word) {
  return word.size() == 64 && word.find_first_not_of("0123456789abcdef") == word.npos;
}

// Sums of kt_manifest.json: shards and the files beside them.
std::vector<Expected> manifest_sums(const std::string& folder) {
  const std::string path = folder + "/kt_manifest.json";
  if (!fs::exists(path)) return {};
  const Json manifest = read_json(path, {.bytes = size_t{1} << 30});
  std::vector<Expected> out;
  const auto add = [&](const Json& file) {
    const bool whole = file.is_object() && file.contains("name") && file["name"].is_string() &&
                       file.contains("bytes") && file["bytes"].is_number_unsigned() &&
                       file.contains("sha256") && file["sha256"].is_string();
    if (!whole) fail("{}: expected files with name, bytes and sha256", path);
    const fs::path name = file["name"].get<std::string>();
    const bool climbs = std::ranges::any_of(name, [](const fs::path& part) { return part == ".."; });
    if (name.empty() || name.is_absolute() || climbs)
      fail("{}: the file \"{}\" is not below its folder", path, shown(name.string()));
    out.push_back({(fs::path(folder) / name).string(), file["bytes"], file["sha256"]});
  };
  if (!manifest.is_object()) fail("{}: expected a mapping", path);
  for (const Json& shard : manifest.value("shards", Json::object()))
    if (shard.is_object())
      for (const Json& file : shard.value("files", Json::array())) add(file);
  for (const Json& file : manifest.value("files", Json::array())) add(file);
  return out;
}

// In a cache of the hub a large file is a link to one that is named by its sum.
std::optional<Expected> hub_sum(const std::string& file) {
  std::error_code code;
  if (!fs::is_symlink(file, code)) return std::nullopt;
  const std::string sum = fs::read_symlink(file, code).filename().string();
  if (code || !is_sha256(sum)) return std::nullopt;
  const uintmax_t bytes = fs::file_size(file, code);
  return code ? std::nullopt : std::optional(Expected{file, bytes, sum});
}

class Verifier {
 public:
  explicit Verifier(const VerifyOptions& options) : options_(options) {}

  // The files at a path by themselves. Whether they are sound enough to be opened as a model.
  bool check_files(const std::string& path) {
    const size_t before = report_.faults.size();
    std::error_code code;
    if (!fs::exists(path, code)) {
      fault(path, "no such file or folder");
      return false;
    }
    if (fs::is_directory(path, code) && has_kt_layers(path)) {
      attempt(path, [&] {
        const KtFolder folder(path);
        check(text("{}: {} of .kt, sizes", path,
                   counted(static_cast<int64_t>(folder.entries().size()), "file")));
      });
      remember_sums(path);
      return report_.faults.size() == before;
    }
    const std::vector<std::string> files = weight_files(path);
    for (const std::string& file : files) attempt(file, [&] { check_header(file); });
    check(text("{}: {}, sizes and headers", path, counted(static_cast<int64_t>(files.size()), "file")));
    if (report_.faults.size() == before) attempt(path, [&] { const Checkpoint all(path); });
    remember_sums(fs::is_directory(path, code) ? path : fs::path(path).parent_path().string());
    for (const std::string& file : files)
      if (const auto sum = hub_sum(file)) sums_.push_back(*sum);
    return report_.faults.size() == before;
  }

  // That all tensors are there, with the shapes that the config asks for.
  void check_tensors(const std::string& path, const std::string& weights) {
    const std::string& shown_path = weights.empty() ? path : weights;
    attempt(shown_path, [&] {
      if (weights.empty() && is_kt_weights(path)) {
        open_kt_weights(path);
        check(text("{}: all experts of all layers", path));
        return;
      }
      try {
        const OpenedModel model(path, {.weights = weights});
        check(weights.empty() ? text("{}: config, tokenizer and all tensors of its architecture", path)
                              : text("{}: all experts of {}", weights, path));
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::kUnsupported) throw;
        check(text("{}: not run by this version, so only its files were looked at", path));
      }
    });
  }

  void check_sums() {
    if (!options_.checksums || sums_.empty()) return;
    const auto start = std::chrono::steady_clock::now();
    ConversionProgress at{.shards = sums_.size()};
    for (const Expected& file : sums_) at.source_total += file.bytes;
    size_t wrong = 0;
    double shown = 0;  // when progress was, in seconds
    for (const Expected& file : sums_) {
      const auto advance = [&](uint64_t bytes) {
        at.source_bytes += bytes;
        at.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        if (!options_.progress || (at.seconds - shown < 0.1 && at.source_bytes < at.source_total)) return;
        shown = at.seconds;
        options_.progress(at);
      };
      if (!attempt(file.path, [&] { check_sum(file, advance); })) ++wrong;
      ++at.shards_done;
    }
    report_.hashed = at.source_bytes;
    check(text("sha256 of {}, {}: {}", counted(static_cast<int64_t>(sums_.size()), "file"),
               human_bytes(report_.hashed), wrong ? text("{} wrong", wrong) : "all right"));
  }

  VerifyReport take() { return std::move(report_); }

 private:
  void check(std::string line) { report_.checks.push_back(std::move(line)); }
  void fault(const std::string& path, std::string reason) {
    if (reason.starts_with(path + ": ")) reason.erase(0, path.size() + 2);
    // A file that fails by itself fails again as part of the whole.
    const bool known = std::ranges::any_of(
        report_.faults, [&](const VerifyFault& f) { return f.path == path && f.reason == reason; });
    if (!known) report_.faults.push_back({path, std::move(reason)});
  }

  // Whether `call` went well; a fault of `path` otherwise.
  template <typename Call>
  bool attempt(const std::string& path, Call&& call) {
    try {
      call();
      return true;
    } catch (const Error& error) {
      fault(path, error.what());
    } catch (const fs::filesystem_error& error) {
      fault(path, error.code().message());
    }
    return false;
  }

  // Those the path means; where some are missing, those that are left.
  std::vector<std::string> weight_files(const std::string& path) {
    try {
      return checkpoint_files(path).files;
    } catch (const Error& error) {
      fault(path, error.what());
    }
    std::vector<std::string> out;
    std::error_code code;
    if (!fs::is_directory(path, code)) return out;
    for (const fs::directory_entry& entry : fs::directory_iterator(path, code)) {
      const std::string name = entry.path().filename().string();
      if (name.ends_with(".safetensors") || name.ends_with(".gguf")) out.push_back(entry.path().string());
    }
    std::ranges::sort(out);
    return out;
  }

  static void check_header(const std::string& file) {
    const MappedFile mapped(file);
    if (file.ends_with(".gguf"))
      parse_gguf(mapped.bytes(), file);
    else
      parse_safetensors(mapped.bytes(), file);
  }

  void remember_sums(const std::string& folder) {
    attempt(folder, [&] {
      for (Expected& file : manifest_sums(folder)) sums_.push_back(std::move(file));
    });
  }

  // read(), not a mapping: a file that shrinks meanwhile is an error here, not a signal.
  template <typename Advance>
  static void check_sum(const Expected& file, Advance&& advance) {
    const Descriptor opened = open_regular(file.path);
    std::vector<std::byte> block(size_t{1} << 20);
    Sha256 sum;
    uint64_t bytes = 0;
    ssize_t got = 0;
    while ((got = ::read(opened.get(), block.data(), block.size())) > 0 || (got < 0 && errno == EINTR)) {
      if (got < 0) continue;
      sum.add(std::span(block).first(static_cast<size_t>(got)));
      bytes += static_cast<uint64_t>(got);
      advance(static_cast<uint64_t>(got));
    }
    if (got < 0) fail("{}: cannot be read: {}", file.path, std::generic_category().message(errno));
    if (bytes != file.bytes) fail("{}: expected {} bytes, found {}", file.path, file.bytes, bytes);
    const std::string found = sum.hex();
    if (found != file.sha256) fail("{}: expected sha256 {}, found {}", file.path, shown(file.sha256), found);
  }

  const VerifyOptions& options_;
  VerifyReport report_;
  std::vector<Expected> sums_;
};

}  // namespace

VerifyReport verify_model(const ResolvedModel& model, const VerifyOptions& options) {
  Verifier verifier(options);
  const bool sound = verifier.check_files(model.path);
  if (sound) verifier.check_tensors(model.path, "");
  if (!model.weights.empty() && verifier.check_files(model.weights) && sound)
    verifier.check_tensors(model.path, model.weights);
  if (!model.gpu.empty() && verifier.check_files(model.gpu)) verifier.check_tensors(model.gpu, "");
  verifier.check_sums();
  return verifier.take();
}

}  // namespace kt
