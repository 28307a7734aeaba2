#include <algorithm>
#include <array>

#include "base/error.h"
#include "hub/download.h"
#include "text/shown.h"

namespace kt::inline hub {
namespace {

bool ends_with_any(const std::string& path, std::span<const std::string_view> ends) {
  return std::ranges::any_of(ends, [&](std::string_view end) { return path.ends_with(end); });
}

bool is_pickle(const std::string& path) {
  constexpr auto kEnds = std::to_array<std::string_view>({".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack"});
  return ends_with_any(path, kEnds);
}

// The same weights once more, or in a form for other programs.
bool is_other_form(const std::string& path) {
  constexpr auto kFolders =
      std::to_array<std::string_view>({"original/", "metal/", "onnx/", "openvino/", "coreml/", ".cache/"});
  constexpr auto kEnds = std::to_array<std::string_view>({".onnx", ".onnx_data", ".tflite", ".mlmodel"});
  const auto below = [&](std::string_view folder) { return path.starts_with(folder); };
  return std::ranges::any_of(kFolders, below) || ends_with_any(path, kEnds);
}

std::vector<std::string> paths_of(std::span<const HubFile> files) {
  std::vector<std::string> out;
  for (const HubFile& file : files) out.push_back(file.path);
  return out;
}

void keep(FileChoice& out, const RepoListing& listing, const std::function<bool(const HubFile&)>& wanted) {
  for (const HubFile& file : listing.files)
    if (wanted(file)) out.wanted.push_back(file);
  out.left_out = listing.files.size() - out.wanted.size();
}

FileChoice by_pattern(const RepoListing& listing, const std::vector<std::string>& include) {
  FileChoice out;
  keep(out, listing, [&](const HubFile& file) {
    return std::ranges::any_of(include, [&](const std::string& p) { return matches_pattern(file.path, p); });
  });
  if (out.wanted.empty())
    fail("{}: no file matches {}; it has {}", listing.repo.str(), shown_list(include),
         shown_list(paths_of(listing.files), 8));
  return out;
}

FileChoice by_gguf(const RepoListing& listing, const std::string& file) {
  FileChoice out{.wanted = gguf_set(listing.files, file, listing.repo.str())};
  if (out.wanted.empty()) {
    const std::vector<std::string> known = gguf_models(listing.files);
    fail("{}: has no file {}; {}", listing.repo.str(), shown(file),
         known.empty() ? "it has no .gguf at all" : "its models are " + shown_list(known, 12));
  }
  out.left_out = listing.files.size() - out.wanted.size();
  return out;
}

}  // namespace

FileChoice select_files(const RepoListing& listing, const DownloadRequest& request) {
  const std::string repo = listing.repo.str();
  if (listing.files.empty()) fail("{}: the repository has no files", repo);
  if (!request.file.empty()) return by_gguf(listing, request.file);
  if (!request.include.empty()) return by_pattern(listing, request.include);
  if (listing.repo.kind == RepoKind::kDataset) return {.wanted = listing.files};
  const auto is_tensors = [](const HubFile& file) {
    return file.path.ends_with(".safetensors") && !is_other_form(file.path);
  };
  const bool tensors = std::ranges::any_of(listing.files, is_tensors);
  const std::vector<std::string> models = gguf_models(listing.files);
  if (!tensors && models.empty()) {
    const auto pickle =
        std::ranges::find_if(listing.files, [](const HubFile& f) { return is_pickle(f.path); });
    if (pickle != listing.files.end())
      fail("{}: its weights are {}, which kt does not read: look for a version in safetensors or GGUF", repo,
           shown(pickle->path));
    fail("{}: a repository without weights ({}); `include` fetches files by name", repo,
         shown_list(paths_of(listing.files), 8));
  }
  if (!tensors && models.size() > 1)
    fail("{}: holds {} models; name one, as {}:{}: {}", repo, models.size(), repo, shown(models.front()),
         shown_list(models, 40));
  const bool twice = std::ranges::any_of(listing.files, [&](const HubFile& file) {
    return is_tensors(file) && !file.path.starts_with("consolidated");
  });
  FileChoice out;
  keep(out, listing, [&](const HubFile& file) {
    if (is_other_form(file.path)) return false;
    if (tensors && (is_pickle(file.path) || file.path.ends_with(".gguf"))) return false;
    return !(twice && file.path.starts_with("consolidated"));
  });
  return out;
}

}  // namespace kt::inline hub
