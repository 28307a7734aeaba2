// Where hubs' own tools keep what they downloaded, and what of a repository is there. Reads names and small files;
// nothing here asks a server.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hub/repository.h"

namespace kt::inline hub {

// The folder of the hub cache, by the variables that huggingface_hub reads, in its order.
std::string hub_cache_folder();
// That of huggingface_hub's other files: HF_HOME, else below XDG_CACHE_HOME or ~/.cache.
std::string hub_home_folder();
// What ModelScope's tools use: MODELSCOPE_CACHE, else ~/.cache/modelscope/hub.
std::string modelscope_cache_folder();
// The folder of a repository there: models/ORG/REPO, each '.' of the name as "___".
std::string modelscope_repo_folder(const RepoId& repo);

struct CachedRepo {
  std::string path;  // a folder that holds the repository's files
  HubSource source = HubSource::kHuggingFace;
  bool unfinished_by_others = false;  // there are parts of files that another program is or was fetching
};

// What the caches have of a revision, "" for the usual one; the hub's first, then ModelScope's. Whether it is whole is
// for others to say. Error where a cache has several snapshots and nothing says which.
std::optional<CachedRepo> find_cached(const RepoId& repo, const std::string& revision = "");

// What a download was to bring, written before its first byte: who finds less has found an unfinished one, and
// whoever wants to verify has the hub's sums.
struct DownloadRecord {
  HubSource source = HubSource::kHuggingFace;
  RepoId repo;
  std::string revision, commit;
  std::vector<HubFile> files;
};

// In a cache's snapshot the record lies beside "snapshots", elsewhere in the folder itself.
std::string record_path(const std::string& folder);
void write_record(const std::string& folder, const DownloadRecord& record);
// Of a model's folder, or of the folder of a model's file; nothing if kt did not download it, or its record is damaged.
std::optional<DownloadRecord> read_record(const std::string& folder);
// Names of the record's files that are missing or of another size.
std::vector<std::string> unfinished_files(const DownloadRecord& record, const std::string& folder);

// Error that names the command to go on with, if `path` is a folder of a download that did not end, or a file in one.
void refuse_unfinished(const std::string& path);

// The sums that the hub's listing gave for files of a folder: kt's record, else the one that huggingface_hub keeps.
std::vector<HubFile> known_sums(const std::string& folder);

// "ORG/REPO" of a folder in a cache, "" if it is in none.
std::string repo_of_folder(const std::string& folder);

}  // namespace kt::inline hub
