#include "hub/cache.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "text/json.h"
#include "text/shown.h"

namespace kt::inline hub {
namespace {

namespace fs = std::filesystem;

constexpr JsonLimits kRecordLimits{.bytes = size_t{256} << 20};

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string expanded(const std::string& path) {
  return path == "~" || path.starts_with("~/") ? variable("HOME") + path.substr(1) : path;
}

bool is_full_folder(const fs::path& path) {
  std::error_code code;
  return fs::is_directory(path, code) && fs::directory_iterator(path, code) != fs::directory_iterator();
}

std::vector<std::string> folders_in(const fs::path& path) {
  std::vector<std::string> out;
  std::error_code code;
  for (const auto& entry : fs::directory_iterator(path, code))
    if (entry.is_directory(code)) out.push_back(entry.path().filename().string());
  std::ranges::sort(out);
  return out;
}

std::string first_line(const fs::path& path) {
  std::string out = read_small_file(path.string()).value_or("");
  return out.substr(0, out.find_first_of(" \r\n\t"));
}

bool has_incomplete(const fs::path& blobs) {
  std::error_code code;
  for (const auto& entry : fs::directory_iterator(blobs, code))
    if (entry.path().extension() == ".incomplete") return true;
  return false;
}

// A repository in the hub's layout.
std::optional<CachedRepo> find_hub_snapshot(const fs::path& folder, const RepoId& repo,
                                            const std::string& revision) {
  const fs::path snapshots = folder / "snapshots";
  const std::vector<std::string> all = folders_in(snapshots);
  if (all.empty()) return std::nullopt;
  CachedRepo out{.path = {}, .unfinished_by_others = has_incomplete(folder / "blobs")};
  const std::string wanted = revision.empty() ? "main" : revision,
                    named = first_line(folder / "refs" / wanted);
  for (const std::string& name : all)
    if (name == named || name == wanted) out.path = (snapshots / name).string();
  if (!out.path.empty()) return out;
  if (!revision.empty()) return std::nullopt;
  if (all.size() > 1)
    fail("{}: {} has {} snapshots and no refs/main that names one: name a folder of {}", repo.str(),
         folder.string(), all.size(), shown_list(all));
  out.path = (snapshots / all.front()).string();
  return out;
}

std::string masked(std::string name) {
  for (size_t at = name.find('.'); at != name.npos; at = name.find('.', at + 3)) name.replace(at, 1, "___");
  return name;
}

// Layouts of the versions of ModelScope's tools, the newest first.
std::optional<CachedRepo> find_modelscope(const RepoId& repo, const std::string& revision) {
  const fs::path base = modelscope_cache_folder();
  const bool given = !variable("MODELSCOPE_CACHE").empty();
  for (const fs::path& root : {base, given ? base / "hub" : base.parent_path()}) {
    const fs::path models = root / "models";
    for (const fs::path& folder : {models / repo.owner / masked(repo.name), models / repo.owner / repo.name,
                                   root / repo.owner / masked(repo.name), root / repo.owner / repo.name})
      if (is_full_folder(folder))
        return CachedRepo{.path = folder.string(), .source = HubSource::kModelScope};
    const fs::path snapshots = models / (repo.owner + "--" + repo.name) / "snapshots";
    for (const std::string& name : {revision.empty() ? std::string("master") : revision, std::string("main")})
      if (is_full_folder(snapshots / name))
        return CachedRepo{.path = (snapshots / name).string(), .source = HubSource::kModelScope};
  }
  return std::nullopt;
}

// Of the hub's layout; a folder of one's own may lie in one called so, too.
bool is_snapshot(const fs::path& folder) {
  const std::string repository = folder.parent_path().parent_path().filename().string();
  return folder.parent_path().filename() == "snapshots" &&
         (repository.starts_with("models--") || repository.starts_with("datasets--"));
}

fs::path normal(const std::string& folder) {
  std::error_code code;
  fs::path out = fs::absolute(folder, code).lexically_normal();
  return out.has_filename() ? out : out.parent_path();
}

std::string text_of(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

uint64_t size_of(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number_unsigned() ? found->get<uint64_t>() : 0;
}

// {"files": {"path": {"size": 1, "blob_id": "...", "lfs": ...}}}, as huggingface_hub keeps a listing.
std::vector<HubFile> tree_sums(const fs::path& path) {
  std::error_code code;
  if (!fs::is_regular_file(path, code)) return {};
  std::vector<HubFile> out;
  const Json tree = read_json(path.string(), kRecordLimits);
  const auto files = tree.is_object() ? tree.find("files") : tree.end();
  if (!tree.is_object() || files == tree.end() || !files->is_object()) return {};
  for (const auto& [name, entry] : files->items()) {
    if (!entry.is_object()) continue;
    HubFile file{.path = name,
                 .size = size_of(entry, "size"),
                 .sha256 = text_of(entry, "lfs_sha256"),
                 .git_sha1 = text_of(entry, "blob_id")};
    check_repo_path(name, path.string());
    if (!is_hex(file.sha256, 64)) file.sha256.clear();
    if (!is_hex(file.git_sha1, 40) || !file.sha256.empty()) file.git_sha1.clear();
    if (!file.sum().empty()) out.push_back(std::move(file));
  }
  return out;
}

DownloadRecord parse_record(const Json& json, const std::string& path) {
  DownloadRecord out{
      .source = text_of(json, "source") == "modelscope" ? HubSource::kModelScope : HubSource::kHuggingFace,
      .repo = {},
      .revision = text_of(json, "revision"),
      .commit = text_of(json, "commit"),
      .files = {}};
  const auto kind = text_of(json, "kind") == "dataset" ? RepoKind::kDataset : RepoKind::kModel;
  const auto repo = parse_repo(text_of(json, "repository"), kind);
  if (!repo) fail("{}: expected the name of a repository", path);
  out.repo = *repo;
  for (const Json& file : json.value("files", Json::array())) {
    if (!file.is_object()) fail("{}: expected files", path);
    HubFile one{.path = text_of(file, "path"),
                .size = size_of(file, "size"),
                .sha256 = text_of(file, "sha256"),
                .git_sha1 = text_of(file, "git_sha1")};
    check_repo_path(one.path, path);
    out.files.push_back(std::move(one));
  }
  return out;
}

}  // namespace

std::string hub_home_folder() {
  if (const std::string home = variable("HF_HOME"); !home.empty()) return expanded(home);
  const std::string caches = variable("XDG_CACHE_HOME");
  return (caches.empty() ? variable("HOME") + "/.cache" : expanded(caches)) + "/huggingface";
}

std::string hub_cache_folder() {
  for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"})
    if (const std::string cache = variable(name); !cache.empty()) return expanded(cache);
  return hub_home_folder() + "/hub";
}

std::string modelscope_cache_folder() {
  if (const std::string cache = variable("MODELSCOPE_CACHE"); !cache.empty()) return expanded(cache);
  return variable("HOME") + "/.cache/modelscope/hub";
}

std::string modelscope_repo_folder(const RepoId& repo) {
  const char* const kind = repo.kind == RepoKind::kModel ? "models" : "datasets";
  return (fs::path(modelscope_cache_folder()) / kind / repo.owner / masked(repo.name)).string();
}

std::optional<CachedRepo> find_cached(const RepoId& repo, const std::string& revision) {
  if (auto found = find_hub_snapshot(fs::path(hub_cache_folder()) / repo.folder(), repo, revision))
    return found;
  return repo.owner.empty() || repo.kind == RepoKind::kDataset ? std::nullopt
                                                               : find_modelscope(repo, revision);
}

std::string record_path(const std::string& folder) {
  const fs::path at = normal(folder);
  if (is_snapshot(at))
    return (at.parent_path().parent_path() / ".kt" / (at.filename().string() + ".json")).string();
  return (at / ".cache" / "kt" / "download.json").string();
}

void write_record(const std::string& folder, const DownloadRecord& record) {
  Json files = Json::array();
  for (const HubFile& file : record.files) {
    Json one = {{"path", file.path}, {"size", file.size}};
    if (!file.sha256.empty()) one["sha256"] = file.sha256;
    if (!file.git_sha1.empty()) one["git_sha1"] = file.git_sha1;
    files.push_back(std::move(one));
  }
  const Json out = {{"source", name_of(record.source)},
                    {"kind", record.repo.kind == RepoKind::kModel ? "model" : "dataset"},
                    {"repository", record.repo.str()},
                    {"revision", record.revision},
                    {"commit", record.commit},
                    {"files", std::move(files)}};
  write_atomically(record_path(folder), out.dump(1) + "\n");
}

std::optional<DownloadRecord> read_record(const std::string& folder) {
  const std::string path = record_path(folder);
  std::error_code code;
  if (!fs::is_regular_file(path, code)) return std::nullopt;
  try {
    const Json json = read_json(path, kRecordLimits);
    if (!json.is_object()) return std::nullopt;
    return parse_record(json, path);
  } catch (const Error&) {  // the next download writes a new one
    return std::nullopt;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

std::vector<std::string> unfinished_files(const DownloadRecord& record, const std::string& folder) {
  std::vector<std::string> out;
  for (const HubFile& file : record.files) {
    std::error_code code;
    const uintmax_t bytes = fs::file_size(fs::path(folder) / file.path, code);
    if (code || bytes != file.size) out.push_back(file.path);
  }
  return out;
}

void refuse_unfinished(const std::string& path) {
  std::error_code code;
  const bool folder = fs::is_directory(path, code);
  const fs::path at = normal(path);
  // A file may lie in a folder of its repository.
  std::vector<fs::path> folders = {folder ? at : at.parent_path()};
  if (!folder) folders.push_back(at.parent_path().parent_path());
  for (const fs::path& each : folders) {
    const auto record = read_record(each.string());
    if (!record) continue;
    std::vector<std::string> missing = unfinished_files(*record, each.string());
    // Of other files in the folder a file needs nothing, but parts of a set look after themselves.
    if (!folder) std::erase_if(missing, [&](const std::string& name) { return each / name != at; });
    if (missing.empty()) continue;
    fail("{}: the download of {} did not end: {} of {} files are missing ({}); kt model download {} goes on",
         path, record->repo.str(), missing.size(), record->files.size(), shown_list(missing, 3),
         record->repo.str());
  }
}

std::vector<HubFile> known_sums(const std::string& folder) {
  if (const auto record = read_record(folder)) return record->files;
  const fs::path at = normal(folder);
  if (!is_snapshot(at)) return {};
  return tree_sums(at.parent_path().parent_path() / "trees" / (at.filename().string() + ".json"));
}

std::string repo_of_folder(const std::string& folder) {
  if (const auto record = read_record(folder)) return record->repo.str();
  const fs::path at = normal(folder);
  if (!is_snapshot(at)) return "";
  const std::string name = at.parent_path().parent_path().filename().string();
  constexpr std::string_view kStart = "models--";
  const size_t dashes = name.find("--", kStart.size());
  if (!name.starts_with(kStart) || dashes == name.npos) return "";
  return name.substr(kStart.size(), dashes - kStart.size()) + "/" + name.substr(dashes + 2);
}

}  // namespace kt::inline hub
