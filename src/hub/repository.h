// Repositories of a hub and their files by name. Names from a command line and names from a server are both checked
// here before anything is asked or written under them.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline hub {

enum class HubSource : uint8_t { kHuggingFace, kModelScope };
std::string_view name_of(HubSource source);  // "hf", "modelscope"

enum class RepoKind : uint8_t { kModel, kDataset };

struct RepoId {
  RepoKind kind = RepoKind::kModel;
  std::string owner, name;  // an old dataset may have no owner

  std::string str() const { return owner.empty() ? name : owner + "/" + name; }
  std::string folder() const;  // "models--ORG--REPO", as the hub's cache calls it
};

// "ORG/REPO", for datasets also "REPO"; nothing if it cannot be one.
std::optional<RepoId> parse_repo(std::string_view repo_id, RepoKind kind = RepoKind::kModel);

// "ORG/REPO[:FILE.gguf]"
struct ModelReference {
  RepoId repo;
  std::string file;  // within the repository, or its last name; "": the model is the repository

  std::string str() const { return file.empty() ? repo.str() : repo.str() + ":" + file; }
};
std::optional<ModelReference> parse_model_reference(std::string_view reference);

// A file as a hub lists it. One of the sums is there, or none.
struct HubFile {
  std::string path;  // within the repository
  uint64_t size = 0;
  std::string sha256, git_sha1;

  const std::string& sum() const { return sha256.empty() ? git_sha1 : sha256; }
};

// Error beginning with `where` unless the name is a path below its repository that any file system takes.
void check_repo_path(std::string_view path, std::string_view where);
// A branch, a tag or a commit: Error unless it can be part of a path.
void check_revision(std::string_view revision);

// Shell patterns as the hub's own tools have them: '*' also matches '/'; one that ends with '/' means all below.
bool matches_pattern(const std::string& path, const std::string& pattern);

bool is_hex(std::string_view word, size_t digits);  // so many of 0-9a-f

// The files that belong to one .gguf: all parts of a split set, else itself. Empty if there is none of that name;
// Error if several folders have one.
std::vector<HubFile> gguf_set(std::span<const HubFile> files, const std::string& name,
                              const std::string& repo);
// The .gguf models of a repository, each by its first file.
std::vector<std::string> gguf_models(std::span<const HubFile> files);

}  // namespace kt::inline hub
