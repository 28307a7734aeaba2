#include "cli/registry/model_verify.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "cli/registry/model_files.h"
#include "engine/loaded_model.h"
#include "hub/cache.h"
#include "hub/part_file.h"
#include "terminal/report.h"
#include "text/shown.h"
#include "weights/checkpoint_files.h"
#include "weights/gguf/gguf.h"
#include "weights/kt/kt_folder.h"
#include "weights/safetensors.h"

namespace kt::inline cli {
namespace {

namespace fs = std::filesystem;

// A file and what it should hash to.
struct Expected {
  std::string path;
  HubFile file;  // its size and sum
};

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
    out.push_back({(fs::path(folder) / name).string(),
                   {.path = name.string(), .size = file["bytes"], .sha256 = file["sha256"]}});
  };
  if (!manifest.is_object()) fail("{}: expected a mapping", path);
  for (const Json& shard : manifest.value("shards", Json::object()))
    if (shard.is_object())
      for (const Json& file : shard.value("files", Json::array())) add(file);
  for (const Json& file : manifest.value("files", Json::array())) add(file);
  return out;
}

// In a cache of the hub a file is a link to one that is named by its sum.
std::optional<Expected> blob_sum(const fs::path& path) {
  std::error_code code;
  if (!fs::is_symlink(path, code)) return std::nullopt;
  HubFile file{.path = path.filename().string(), .size = fs::file_size(path, code)};
  if (code) return std::nullopt;
  const std::string sum = fs::read_symlink(path, code).filename().string();
  if (is_hex(sum, 64)) file.sha256 = sum;
  if (is_hex(sum, 40)) file.git_sha1 = sum;
  return file.sum().empty() ? std::nullopt : std::optional(Expected{path.string(), std::move(file)});
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
    const std::string folder = fs::is_directory(path, code) ? path : fs::path(path).parent_path().string();
    remember_sums(folder);
    remember_hub_sums(path, folder);
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
    for (const Expected& file : sums_) at.source_total += file.file.size;
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
      if (attempt(file.path, [&] { check_sum(file, advance); }))
        report_.sums.push_back(text("{}  {}", file.file.sum(), file.path));
      else
        ++wrong;
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

  // What the hub lists: as it says now where asked, else as it did when the files came; else by the names of blobs.
  void remember_hub_sums(const std::string& path, const std::string& folder) {
    attempt(folder, [&] {
      const bool alone = path != folder;
      const auto is_meant = [&](const std::string& file) { return !alone || file == path; };
      const std::vector<HubFile> listed =
          options_.hub_listing ? options_.hub_listing(folder) : known_sums(folder);
      size_t count = 0;
      std::error_code code;
      for (const HubFile& file : listed) {
        const std::string at = (fs::path(folder) / file.path).string();
        // The hub has more than what was fetched.
        if (!is_meant(at) || (options_.hub_listing && !fs::exists(at, code))) continue;
        sums_.push_back({at, file});
        ++count;
      }
      for (fs::directory_iterator at(folder, code), end; listed.empty() && !code && at != end;
           at.increment(code))
        if (const auto sum = blob_sum(at->path()); sum && is_meant(at->path().string())) {
          sums_.push_back(*sum);
          ++count;
        }
      if (count > 0)
        check(text("{}: sums of the hub for {}{}", folder, counted(static_cast<int64_t>(count), "file"),
                   options_.hub_listing ? ", asked now" : ""));
    });
  }

  // Reads: a file that shrinks meanwhile is an error here, not a signal.
  template <typename Advance>
  static void check_sum(const Expected& file, Advance&& advance) {
    const std::string wrong = wrong_bytes(file.path, file.file, advance);
    if (!wrong.empty()) fail("{}: {}", file.path, wrong);
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

}  // namespace kt::inline cli
