// kt doctor on the disk that models are read from: space, kind, and how fast a large file of the folder comes
// in, past the kernel's cache. Reads only; nothing is written.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/memory.h"
#include "base/text.h"
#include "bench/measure.h"
#include "cli/doctor/doctor.h"
#include "terminal/language.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

constexpr uint64_t kTestFile = uint64_t{8} << 20;  // smaller ones say little
constexpr uint64_t kTestBytes = uint64_t{512} << 20;
constexpr double kTestSeconds = 1.0;
constexpr uint64_t kLittleSpace = uint64_t{10} << 30;

const char* file_system(const std::string& folder) {
  struct statfs facts{};
  if (::statfs(folder.c_str(), &facts) != 0) return "unknown";
  switch (static_cast<unsigned long>(facts.f_type)) {
    case 0xEF53:
      return "ext4";
    case 0x58465342:
      return "xfs";
    case 0x9123683E:
      return "btrfs";
    case 0x2FC12FC1:
      return "zfs";
    case 0x01021994:
      return "tmpfs";
    case 0x794C7630:
      return "overlay";
    case 0x6969:
      return "nfs";
    case 0xFF534D42:
    case 0xFE534D42:
      return "smb";
    case 0x65735546:
      return "fuse";
    case 0x01021997:
      return "9p";
    default:
      return "other";
  }
}

struct LargeFile {
  std::string path;
  uint64_t bytes = 0;
};

// The largest file of the folder itself or one level below; the path itself when it is a file.
LargeFile largest_file(const std::string& folder) {
  namespace fs = std::filesystem;
  LargeFile best;
  const auto consider = [&](const fs::directory_entry& entry) {
    std::error_code error;
    if (!entry.is_regular_file(error) || error) return;
    const uint64_t bytes = entry.file_size(error);
    if (!error && bytes > best.bytes && ::access(entry.path().c_str(), R_OK) == 0)
      best = {entry.path().string(), bytes};
  };
  std::error_code error;
  consider(fs::directory_entry(folder, error));
  int seen = 0;
  constexpr int kMostEntries = 4096;  // a home folder must not take minutes
  for (fs::recursive_directory_iterator at(folder, fs::directory_options::skip_permission_denied, error), end;
       !error && at != end && ++seen < kMostEntries; at.increment(error)) {
    if (at.depth() >= 1) at.disable_recursion_pending();
    consider(*at);
  }
  return best;
}

struct ReadRate {
  double bytes_per_second = 0;
  uint64_t bytes = 0;
  bool direct = false;  // past the kernel's cache
};

// Big reads one after another, as loading a model does.
ReadRate measure_read(const LargeFile& file) {
  ReadRate rate{.direct = true};
  int fd = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (fd < 0) {
    rate.direct = false;
    fd = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return rate;
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  }
  Buffer piece(size_t{4} << 20);
  const double from = now_seconds();
  while (rate.bytes < kTestBytes && now_seconds() - from < kTestSeconds) {
    const ssize_t got = ::pread(fd, piece.data(), piece.size(), static_cast<off_t>(rate.bytes));
    if (got <= 0) break;
    rate.bytes += static_cast<uint64_t>(got);
    if (static_cast<size_t>(got) < piece.size()) break;
  }
  const double seconds = now_seconds() - from;
  ::close(fd);
  if (rate.bytes > 0 && seconds > 0) rate.bytes_per_second = static_cast<double>(rate.bytes) / seconds;
  return rate;
}

void look_at_read_speed(Diagnosis& d, const std::string& folder) {
  const LargeFile file = largest_file(folder);
  if (file.bytes < kTestFile) {
    d.findings.push_back({tr_later("disk read"),
                          text(tr("not measured: no file of {} or more in {}; name a model's folder: kt "
                                  "doctor --disk DIR"),
                               human_bytes(kTestFile), folder)});
    return;
  }
  const ReadRate rate = measure_read(file);
  const double gb = rate.bytes_per_second / 1e9;
  d.facts["disk"]["read_gb_per_s"] = gb;
  d.facts["disk"]["read_direct"] = rate.direct;
  Finding f{tr_later("disk read"), text(tr("{} GB/s, {} of {}{}"), three_digits(gb), human_bytes(rate.bytes),
                                        file.path, rate.direct ? "" : tr_now(" (perhaps from the cache)"))};
  constexpr double kSlow = 0.5;  // GB/s: SATA's end; below it a disk or a network is the wait at every start
  if (gb < kSlow) {
    f.level = Level::kWarning;
    f.cost = text(tr("a model of 30 GB takes {} s to load the first time"), gb > 0 ? fixed(30 / gb, 0) : "?");
    f.fix = tr_now("copy models to a local NVMe disk");
  }
  d.findings.push_back(f);
}

}  // namespace

void look_at_disk(Diagnosis& d, const Machine& machine, DiskTest test) {
  struct statvfs facts{};
  if (::statvfs(machine.folder.c_str(), &facts) != 0) {
    d.facts["disk"] = {{"path", machine.folder}};
    d.findings.push_back({tr_later("disk"), text("{}: {}", machine.folder, std::strerror(errno)),
                          Level::kWarning, tr_now("nothing is known about the disk"),
                          tr_now("kt doctor --disk DIR with a folder that exists")});
    return;
  }
  const uint64_t unused = uint64_t{facts.f_bavail} * facts.f_frsize,
                 total = uint64_t{facts.f_blocks} * facts.f_frsize;
  d.facts["disk"] = {{"path", machine.folder},
                     {"file_system", file_system(machine.folder)},
                     {"free_bytes", unused},
                     {"total_bytes", total}};
  Finding f{tr_later("disk"), text(tr("{} of {} free at {} ({})"), human_bytes(unused), human_bytes(total),
                                   machine.folder, file_system(machine.folder))};
  if (unused < kLittleSpace) {
    f.level = Level::kWarning;
    f.cost = text(tr("conversions above {} are refused"), human_bytes(unused));
    f.fix = tr_now(
        "free some space, see: du -xh --max-depth=1 . | sort -h; or name another disk with --disk DIR");
  }
  d.findings.push_back(f);
  if (test == DiskTest::kRead) look_at_read_speed(d, machine.folder);
}

}  // namespace kt::inline cli
