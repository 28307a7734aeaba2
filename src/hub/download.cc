#include "hub/download.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "base/error.h"
#include "hub/part_file.h"
#include "hub/transfers.h"

namespace kt::inline hub {
namespace {

namespace fs = std::filesystem;

// The free bytes where a folder is or will be.
uint64_t free_bytes(fs::path folder) {
  std::error_code code;
  folder = fs::absolute(folder, code);
  while (!fs::exists(folder, code) && folder.has_relative_path()) folder = folder.parent_path();
  struct statvfs facts{};
  if (::statvfs(folder.c_str(), &facts) != 0) return UINT64_MAX;  // the writes will say
  return uint64_t{facts.f_bavail} * facts.f_frsize;
}

uint64_t bytes_missing(const Store& store, std::span<const TransferJob> jobs, uint64_t piece) {
  uint64_t out = 0;
  for (const TransferJob& job : jobs)
    out += job.file.size - PartFile::bytes_there(store.part_path(job.file), job.file.size, piece);
  return out;
}

// Those of the files that `is_there` does not know, the same bytes together.
std::vector<TransferJob> jobs_of(const Store& store, std::span<const HubFile> files,
                                 const std::function<bool(const HubFile&)>& is_there) {
  std::map<std::string, TransferJob> by_sum;
  for (const HubFile& file : files) {
    if (is_there(file)) continue;
    TransferJob& job =
        by_sum.try_emplace(store.part_path(file), TransferJob{.file = file, .paths = {}}).first->second;
    if (job.file.size != file.size) fail("{} and {}: one sum and two sizes", job.file.path, file.path);
    job.paths.push_back(file.path);
  }
  std::vector<TransferJob> out;
  for (auto& [part, job] : by_sum) out.push_back(std::move(job));
  // Small ones first: a refusal or a full disk shows early, and configs are there to be looked at.
  std::ranges::sort(out, {}, [](const TransferJob& job) { return std::pair(job.file.size, job.file.path); });
  return out;
}

// What was wanted before, of the same commit, stays wanted.
DownloadRecord record_of(const RepoListing& listing, HubSource source, std::span<const HubFile> wanted,
                         const std::string& folder) {
  DownloadRecord out{.source = source,
                     .repo = listing.repo,
                     .revision = listing.revision,
                     .commit = listing.commit,
                     .files = {wanted.begin(), wanted.end()}};
  const auto before = read_record(folder);
  if (!before || before->commit != listing.commit || before->repo.str() != listing.repo.str()) return out;
  for (const HubFile& old : before->files) {
    const bool listed = std::ranges::find(listing.files, old.path, &HubFile::path) != listing.files.end();
    if (listed && std::ranges::find(out.files, old.path, &HubFile::path) == out.files.end())
      out.files.push_back(old);
  }
  std::ranges::sort(out.files, {}, &HubFile::path);
  return out;
}

void check_listing(RepoListing& listing, const DownloadRequest& request) {
  const auto twice = std::ranges::adjacent_find(listing.files, {}, &HubFile::path);
  if (twice != listing.files.end()) fail("{}: {} is listed twice", listing.repo.str(), twice->path);
  const bool plain = !request.folder.empty() || request.source == HubSource::kModelScope;
  // That folder is ours, and that of others like us.
  if (plain)
    std::erase_if(listing.files, [](const HubFile& file) { return file.path.starts_with(".cache/"); });
}

std::string usual_revision(HubSource source) { return source == HubSource::kHuggingFace ? "main" : "master"; }

}  // namespace

Download::Download(DownloadRequest request) : request_(std::move(request)), client_(request_.source) {
  if (request_.revision.empty()) request_.revision = usual_revision(request_.source);
  listing_ = client_.list(request_.repo, request_.revision);
  check_listing(listing_, request_);
  choice_ = select_files(listing_, request_);
  folder_ = Store(listing_, request_.source, request_.folder).folder();
}

Download::~Download() = default;

uint64_t Download::bytes() const {
  uint64_t out = 0;
  for (const HubFile& file : choice_.wanted) out += file.size;
  return out;
}

uint64_t Download::bytes_to_fetch() const {
  const Store store(listing_, request_.source, request_.folder);
  const auto seems = [&](const HubFile& file) { return store.seems_to_have(file); };
  const std::vector<TransferJob> jobs = jobs_of(store, choice_.wanted, seems);
  if (!request_.fresh) return bytes_missing(store, jobs, request_.piece);
  uint64_t out = 0;
  for (const TransferJob& job : jobs) out += job.file.size;
  return out;
}

std::string Download::read(const std::string& path) {
  const auto file = std::ranges::find(listing_.files, path, &HubFile::path);
  return file == listing_.files.end() ? "" : client_.read(listing_, path, size_t{16} << 20);
}

DownloadResult Download::run() {
  Store before(listing_, request_.source, request_.folder);
  before.prepare();
  const FolderLock lock(before.state() + "/lock", [&] {
    if (request_.note)
      request_.note(text("another download of {} is under way; waiting for it", listing_.repo.str()));
  });
  Store store(listing_, request_.source, request_.folder);  // whoever held the lock may have brought it all
  std::vector<TransferJob> jobs =
      jobs_of(store, choice_.wanted, [&](const HubFile& file) { return store.has(file); });
  write_record(folder_, record_of(listing_, request_.source, choice_.wanted, folder_));
  std::erase_if(jobs, [&](const TransferJob& job) {
    bool adopted = true;
    for (const std::string& path : job.paths) {
      HubFile file = job.file;
      file.path = path;
      adopted = adopted && store.adopt(file);
    }
    return adopted;
  });
  if (request_.fresh)
    for (const TransferJob& job : jobs)
      PartFile(store.part_path(job.file), job.file.size, request_.piece).discard();
  const uint64_t missing = bytes_missing(store, jobs, request_.piece), free = free_bytes(folder_);
  if (missing > free)
    fail_as(ErrorKind::kMemory,
            "{}: {} to download, and {} has {} free; `local_dir` names another folder, HF_HOME another cache",
            listing_.repo.str(), human_bytes(missing), folder_, human_bytes(free));
  DownloadResult out{.path = folder_};
  if (!jobs.empty()) out.fetched = transfer_files(client_, listing_, store, request_, std::move(jobs));
  store.finish();
  if (!request_.file.empty()) out.path = (fs::path(folder_) / choice_.wanted.front().path).string();
  return out;
}

}  // namespace kt::inline hub
