#include "hub/store.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "base/file.h"
#include "base/sha256.h"
#include "hub/part_file.h"

namespace kt::inline hub {
namespace {

namespace fs = std::filesystem;

void make_folders(const fs::path& path) {
  std::error_code code;
  fs::create_directories(path, code);
  if (code) fail("{}: cannot create the folder: {}", path.string(), code.message());
}

void rename_file(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0)
    fail("{}: cannot be renamed to {}: {}", from, to, std::generic_category().message(errno));
}

bool is_whole(const fs::path& path, const HubFile& file) {
  std::error_code code;
  return fs::is_regular_file(path, code) && fs::file_size(path, code) == file.size && !code;
}

}  // namespace

Store::Store(const RepoListing& listing, HubSource source, const std::string& folder) : listing_(listing) {
  if (folder.empty() && source == HubSource::kHuggingFace) {
    const fs::path root = fs::path(hub_cache_folder()) / listing.repo.folder();
    folder_ = (root / "snapshots" / listing.commit).string();
    state_ = (root / ".kt").string();
    blobs_ = (root / "blobs").string();
    refs_ = (root / "refs").string();
    return;
  }
  folder_ = folder.empty() ? modelscope_repo_folder(listing.repo) : folder;
  state_ = (fs::path(folder_) / ".cache" / "kt").string();
  before_ = read_record(folder_);
}

std::string Store::part_path(const HubFile& file) const {
  std::string name = file.sum();
  if (name.empty()) {
    Sha256 sum;
    sum.add(std::as_bytes(std::span(file.path)));
    name = sum.hex();
  }
  return (fs::path(state_) / "parts" / name).string();
}

bool Store::has(const HubFile& file) const {
  const fs::path path = fs::path(folder_) / file.path;
  if (!is_whole(path, file)) return false;
  if (is_cache()) {
    std::error_code code;
    return file.sum().empty() || !fs::is_symlink(path, code) ||
           fs::read_symlink(path, code).filename() == file.sum();
  }
  if (before_) {
    const auto old = std::ranges::find(before_->files, file.path, &HubFile::path);
    if (old != before_->files.end() && old->size == file.size && old->sum() == file.sum()) return true;
  }
  return wrong_bytes(path.string(), file).empty();
}

bool Store::seems_to_have(const HubFile& file) const { return is_whole(fs::path(folder_) / file.path, file); }

bool Store::adopt(const HubFile& file) {
  if (!is_cache()) return false;
  const fs::path blob = fs::path(blobs_) / file.sum();
  if (!is_whole(blob, file)) return false;
  link_blob(blob.string(), file.path);
  return true;
}

void Store::prepare() {
  make_folders(fs::path(state_) / "parts");
  make_folders(folder_);
  if (!is_cache()) return;
  make_folders(blobs_);
  make_folders(refs_);
}

void Store::link_blob(const std::string& blob, const std::string& path) {
  const fs::path to = fs::path(folder_) / path;
  make_folders(to.parent_path());
  const std::string target = fs::path(blob).lexically_relative(to.parent_path()).string();
  // Made beside and renamed: the name is never without a file that it had.
  const std::string link = (fs::path(state_) / "link").string();
  ::unlink(link.c_str());
  if (::symlink(target.c_str(), link.c_str()) != 0)
    fail("{}: cannot be made a link: {}; `local_dir` writes plain files", to.string(),
         std::generic_category().message(errno));
  rename_file(link, to.string());
}

void Store::place(const std::string& part, const HubFile& file, const std::vector<std::string>& paths) {
  if (is_cache()) {
    const std::string blob = (fs::path(blobs_) / file.sum()).string();
    rename_file(part, blob);
    for (const std::string& path : paths) link_blob(blob, path);
    return;
  }
  const fs::path first = fs::path(folder_) / paths.front();
  for (const std::string& path : paths) {
    const fs::path to = fs::path(folder_) / path;
    make_folders(to.parent_path());
    if (path == paths.front()) continue;
    const std::string copy = part + ".copy";
    std::error_code code;
    fs::copy_file(part, copy, fs::copy_options::overwrite_existing, code);
    if (code) fail("{}: cannot be written: {}", to.string(), code.message());
    rename_file(copy, to.string());
  }
  rename_file(part, first.string());
}

void Store::finish() {
  if (!is_cache() || listing_.revision == listing_.commit) return;
  const fs::path path = fs::path(refs_) / listing_.revision;
  make_folders(path.parent_path());
  write_atomically(path.string(), listing_.commit);
}

}  // namespace kt::inline hub
