#include "engine/calibration/dataset_files.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "hub/cache.h"

namespace kt::inline engine {
namespace {

namespace fs = std::filesystem;

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

bool names_split(std::string_view path, std::string_view split) {
  if (split.empty()) return true;
  for (size_t at = path.find(split); at != path.npos; at = path.find(split, at + 1)) {
    const size_t end = at + split.size();
    if ((at == 0 || !is_word(path[at - 1])) && (end == path.size() || !is_word(path[end]))) return true;
  }
  return false;
}

// Files that lie beside data.
bool is_no_data(const fs::path& within) {
  for (const fs::path& part : within)
    if (part.string().starts_with('.')) return true;
  std::string name = within.filename().string();
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
  constexpr std::array<std::string_view, 10> kBeside = {
      "license", "licence",   "readme",   "notice",       "copying",
      "authors", "changelog", "citation", "requirements", "dataset_info"};
  return name == "dataset_dict.json" || name == "state.json" || name == "config.json" ||
         std::ranges::any_of(kBeside, [&](std::string_view start) { return name.starts_with(start); });
}

// What refs/main says, or else the newest.
fs::path snapshot_of(const fs::path& repository, const DatasetRequest& request) {
  const fs::path snapshots = repository / "snapshots";
  std::error_code code;
  if (std::optional<std::string> main = read_small_file(repository / "refs" / "main")) {
    main->resize(main->find_last_not_of(" \r\n") + 1);
    if (!main->empty() && fs::is_directory(snapshots / *main, code)) return snapshots / *main;
  }
  std::optional<std::pair<fs::file_time_type, fs::path>> newest;
  for (const auto& entry : fs::directory_iterator(snapshots, code)) {
    if (!entry.is_directory(code)) continue;
    const std::pair here(entry.last_write_time(code), entry.path());
    if (!newest || *newest < here) newest = here;
  }
  if (!newest)
    fail(
        "`{}` {}: not a file, and not in the local hub cache ({}); `download` fetches it, or pass a "
        ".jsonl or .txt file",
        request.option, request.dataset, snapshots.string());
  return newest->second;
}

std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kMost = 5;
  std::string out;
  for (size_t i = 0; i < std::min(names.size(), kMost); ++i) out += (i > 0 ? ", " : "") + names[i];
  return names.size() > kMost ? text("{} and {} more", out, names.size() - kMost) : out;
}

DatasetFiles hub_files(const DatasetRequest& request) {
  std::string name = request.dataset;
  if (const size_t at = name.find('/'); at != name.npos) name.replace(at, 1, "--");
  const fs::path folder = snapshot_of(fs::path(hub_cache_folder()) / ("datasets--" + name), request);
  constexpr std::array<std::string_view, 4> kKinds = {".jsonl", ".parquet", ".json", ".txt"};
  std::array<std::vector<std::string>, kKinds.size()> found;
  std::vector<std::string> others;
  std::error_code code;
  for (const auto& entry : fs::recursive_directory_iterator(folder, code)) {
    const fs::path within = entry.path().lexically_relative(folder);
    const auto kind = std::ranges::find(kKinds, within.extension().string());
    if (kind == kKinds.end() || entry.is_directory(code) || is_no_data(within)) continue;
    const bool chosen = names_split(within.string(), request.split);
    (chosen ? found[static_cast<size_t>(kind - kKinds.begin())] : others).push_back(within.string());
  }
  const auto first = std::ranges::find_if(found, [](const auto& names) { return !names.empty(); });
  if (first == found.end()) {
    std::ranges::sort(others);
    fail("`{}` {}: {} has no .jsonl or .txt file{}{}", request.option, request.dataset, folder.string(),
         request.split.empty() ? "" : text(" of split {}", request.split),
         others.empty() ? "" : text("; it has {}", listed(others)));
  }
  if (first == found.begin() + 1 && !request.parquet)
    fail_as(ErrorKind::kUnsupported,
            "`{}` {}: its files are .parquet, which kt does not read; scripts/convert_gpu_weights.py "
            "converts them where pyarrow is installed, or pass a .jsonl or .txt file",
            request.option, request.dataset);
  std::ranges::sort(*first);
  DatasetFiles out{.kind = dataset_kind(first->front()),
                   .paths = {},
                   .names = *first,
                   .revision = folder.filename().string()};
  for (const std::string& within : out.names) out.paths.push_back((folder / within).string());
  return out;
}

// "org/name" or "name", and no path of a file.
bool is_hub_name(const std::string& name) {
  const auto fits = [](char c) { return is_word(c) || c == '-' || c == '.' || c == '/'; };
  const std::string kind = fs::path(name).extension().string();
  return !name.empty() && std::ranges::all_of(name, fits) && std::ranges::count(name, '/') <= 1 &&
         name.front() != '/' && name.front() != '.' && name.back() != '/' && kind != ".jsonl" &&
         kind != ".json" && kind != ".txt" && kind != ".parquet" && kind != ".csv";
}

}  // namespace

DatasetKind dataset_kind(const std::string& path) {
  const std::string kind = fs::path(path).extension().string();
  if (kind == ".parquet") return DatasetKind::kTables;
  return kind == ".jsonl" || kind == ".json" ? DatasetKind::kRows : DatasetKind::kDocuments;
}

DatasetFiles find_dataset(const DatasetRequest& request) {
  const fs::path path = request.dataset;
  std::error_code code;
  if (!fs::exists(path, code)) {
    if (is_hub_name(request.dataset)) return hub_files(request);
    fail("`{}` {}: no such file", request.option, request.dataset);
  }
  if (fs::is_directory(path, code))
    fail("`{}` {}: a folder; expected a file", request.option, request.dataset);
  const std::string kind = path.extension().string();
  if (kind == ".parquet" && !request.parquet)
    fail_as(ErrorKind::kUnsupported,
            "`{}` {}: kt does not read .parquet; scripts/convert_gpu_weights.py converts it where pyarrow "
            "is installed, or pass a .jsonl or .txt file",
            request.option, request.dataset);
  if (kind != ".jsonl" && kind != ".json" && kind != ".txt" && kind != ".parquet")
    fail("`{}` {}: expected a .jsonl or .txt file", request.option, request.dataset);
  if (!request.split.empty())
    KT_LOG(LogLevel::kWarning, "split {}: {} is one file, without splits; all of it counts", request.split,
           request.dataset);
  return {.kind = dataset_kind(request.dataset),
          .paths = {request.dataset},
          .names = {request.dataset},
          .revision = {}};
}

}  // namespace kt::inline engine
