#include "cli/registry/model_scan.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/error.h"
#include "weights/kt/kt_names.h"

namespace kt::inline cli {
namespace {

namespace fs = std::filesystem;

// What the names in one folder say.
struct Listing {
  std::vector<std::string> folders, gguf;  // paths, ascending; of split sets the first part only
  bool has_safetensors = false, has_kt_layers = false;
};

// "-00002-of-00003.gguf" and further ones: not where a set begins.
bool is_later_part(const std::string& name) {
  const size_t of = name.rfind("-of-");
  if (of == name.npos || of == 0) return false;
  const size_t dash = name.rfind('-', of - 1);
  if (dash == name.npos || dash + 1 == of) return false;
  const std::string_view number = std::string_view(name).substr(dash + 1, of - dash - 1);
  if (number.find_first_not_of("0123456789") != number.npos) return false;
  return number.back() != '1' || number.find_first_not_of('0') != number.size() - 1;
}

class Scanner {
 public:
  Scanner(const std::vector<std::string>& roots, const ScanOptions& options) : options_(options) {
    for (const std::string& root : roots) {
      std::error_code missing;  // the walk says so
      roots_.push_back(fs::canonical(root, missing));
    }
  }

  void walk(const std::string& path, int depth) {
    if (!is_new(path)) return;
    if (result_.folders == options_.folders) {
      if (!std::exchange(full_, true))
        problem(path, text("stopped here after {} folders; scan a smaller part", options_.folders));
      return;
    }
    ++result_.folders;
    if (options_.progress) options_.progress(result_.folders, result_.found.size());
    const Listing listing = list(path);
    if (listing.has_kt_layers || listing.has_safetensors) inspect(path);
    for (const std::string& file : listing.gguf) inspect(file);
    if (listing.has_kt_layers || listing.has_safetensors || depth == 0) return;
    for (const std::string& folder : listing.folders) walk(folder, depth - 1);
  }

  ScanResult take() {
    std::ranges::sort(result_.found, {}, &ModelFiles::path);
    return std::move(result_);
  }

 private:
  void problem(const std::string& path, std::string reason) {
    // Errors name the path themselves.
    if (reason.starts_with(path + ": ")) reason.erase(0, path.size() + 2);
    result_.problems.push_back({path, std::move(reason)});
  }

  // Each folder once, by whatever way it is reached.
  bool is_new(const std::string& path) {
    struct stat facts{};
    if (::stat(path.c_str(), &facts) != 0) return true;  // list() will say why
    return seen_.emplace(facts.st_dev, facts.st_ino).second;
  }

  // Says so: what lies there was not asked for.
  bool leads_out(const fs::path& link) {
    std::error_code code;
    const fs::path to = fs::canonical(link, code);
    const auto holds = [&](const fs::path& root) {
      return !root.empty() &&
             std::mismatch(root.begin(), root.end(), to.begin(), to.end()).first == root.end();
    };
    if (code || std::ranges::any_of(roots_, holds)) return false;
    problem(link.string(), text("a link out of what is scanned, to {}: scan that too", to.string()));
    return true;
  }

  Listing list(const std::string& path) {
    Listing out;
    std::error_code code;
    fs::directory_iterator at(path, code);
    for (const fs::directory_iterator end; !code && at != end; at.increment(code)) {
      const std::string name = at->path().filename().string();
      std::error_code gone;
      if (name.starts_with('.')) continue;
      if (at->is_directory(gone)) {
        if (at->is_symlink(gone) && leads_out(at->path())) continue;
        out.has_kt_layers |= parse_kt_layer_folder(name).has_value();
        out.folders.push_back(at->path().string());
      } else if (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")) {
        out.has_safetensors = true;
      } else if (name.ends_with(".gguf") && !is_later_part(name)) {
        out.gguf.push_back(at->path().string());
      }
    }
    if (code) problem(path, code.message());
    std::ranges::sort(out.folders);
    std::ranges::sort(out.gguf);
    return out;
  }

  void inspect(const std::string& path) {
    try {
      if (auto found = try_inspect_model(path)) result_.found.push_back(std::move(*found));
    } catch (const Error& error) {
      problem(path, error.what());
    }
  }

  const ScanOptions& options_;
  std::vector<fs::path> roots_;
  ScanResult result_;
  std::set<std::pair<dev_t, ino_t>> seen_;
  bool full_ = false;
};

// The model these weights belong to: the one they say, else the one with the longest name that theirs begins
// with. Null if none, or if two could be meant.
ScanModel* owner_of(std::vector<ScanModel>& models, const ModelFiles& weights) {
  ScanModel* best = nullptr;
  Kinship closest = Kinship::kShape;
  bool doubtful = false;
  for (ScanModel& model : models) {
    const Kinship kin = kinship(model.files, weights);
    if (kin <= Kinship::kShape || kin < closest) continue;
    const size_t length = model.files.name.size(), before = best ? best->files.name.size() : 0;
    if (best && kin == closest && length < before) continue;
    doubtful = best && kin == closest && length == before;
    best = &model;
    closest = kin;
  }
  return doubtful ? nullptr : best;
}

}  // namespace

ScanResult scan_folders(const std::vector<std::string>& roots, const ScanOptions& options) {
  Scanner scanner(roots, options);
  for (const std::string& root : roots) scanner.walk(absolute_path(root), options.depth);
  return scanner.take();
}

ScanGroups group_findings(const std::vector<ModelFiles>& found) {
  ScanGroups out;
  for (const ModelFiles& files : found)
    if (files.kind == FilesKind::kModel || files.kind == FilesKind::kGguf)
      out.models.push_back({.files = files, .weights = {}, .gpu = {}});
  std::vector<ModelFiles> alone;
  std::map<std::string, uint64_t> sizes;  // of what is linked so far, by path
  for (const ModelFiles& files : found) {
    if (files.kind != FilesKind::kCpuWeights && files.kind != FilesKind::kGpuWeights) continue;
    ScanModel* const owner = owner_of(out.models, files);
    if (!owner) {
      alone.push_back(files);
      continue;
    }
    std::string& link = files.kind == FilesKind::kCpuWeights ? owner->weights : owner->gpu;
    if (link.empty() || sizes[link] < files.bytes) link = files.path;
    sizes[files.path] = files.bytes;
  }
  for (const ModelFiles& files : alone) {
    if (files.kind == FilesKind::kGpuWeights)
      out.models.push_back({.files = files, .weights = {}, .gpu = {}});
    else
      out.lonely.push_back(files);
  }
  return out;
}

}  // namespace kt::inline cli
