#include "base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace kt::inline base {

namespace {

std::string reason(int code) { return std::generic_category().message(code); }

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

ErrorKind kind_of(int code) {
  return code == ENOSPC || code == EDQUOT || code == EFBIG ? ErrorKind::kMemory : ErrorKind::kInput;
}

ErrorKind read_kind(int code) { return code == ENOMEM ? ErrorKind::kMemory : ErrorKind::kInput; }

std::string_view kind_name(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

// Neither waits for the other end of a FIFO nor makes a terminal ours.
Descriptor open_without_waiting(const std::string& path) {
  return Descriptor(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
}

// Reads to the end, or one byte more than `most`. -1, or what went wrong.
int read_to(const Descriptor& file, size_t most, std::string& out) {
  char chunk[4096];
  while (out.size() <= most) {
    const ssize_t got = read(file.get(), chunk, std::min(sizeof chunk, most + 1 - out.size()));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) break;
    out.append(chunk, static_cast<size_t>(got));
  }
  return -1;
}

[[noreturn]] void write_failed(const std::string& path, uint64_t wanted, int code) {
  fail_as(kind_of(code), "{}: cannot write {} bytes: {}", path, wanted, reason(code));
}

}  // namespace

void Descriptor::reset() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this == &other) return *this;
  reset();
  fd_ = std::exchange(other.fd_, -1);
  return *this;
}

bool may_write_again(std::span<const std::byte> rest, bool& touched) noexcept {
  if (errno == EINTR) return true;
  if (errno != EFAULT || std::exchange(touched, true)) return false;
  touch_pages(rest);
  return true;
}

Descriptor open_regular(const std::string& path) {
  Descriptor file = open_without_waiting(path);
  // A socket cannot be opened at all.
  if (file.get() < 0 && errno != ENXIO) fail_as(read_kind(errno), "{}: cannot open: {}", path, reason(errno));
  struct stat facts{};
  if ((file.get() < 0 ? stat(path.c_str(), &facts) : fstat(file.get(), &facts)) != 0)
    fail("{}: cannot stat: {}", path, reason(errno));
  if (!S_ISREG(facts.st_mode)) fail("{}: expected a regular file, got {}", path, kind_name(facts.st_mode));
  if (file.get() < 0) fail("{}: cannot open: {}", path, reason(ENXIO));
  return file;
}

void refuse_link(const std::string& path) {
  struct stat facts{};
  if (lstat(path.c_str(), &facts) == 0 && S_ISLNK(facts.st_mode))
    fail("{}: a symbolic link; nothing is written or removed behind one: remove it or choose another folder",
         path);
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const Descriptor file = open_regular(path);
  struct stat facts{};
  if (fstat(file.get(), &facts) != 0) fail("{}: cannot stat: {}", path, reason(errno));
  size_ = static_cast<size_t>(facts.st_size);
  if (size_ == 0) return;
  void* const got = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.get(), 0);
  if (got == MAP_FAILED) fail_as(read_kind(errno), "{}: cannot map {} bytes: {}", path, size_, reason(errno));
  data_ = static_cast<const std::byte*>(got);
  try {
    watch_ = MappingWatch(bytes(), path);
  } catch (...) {
    release();
    throw;
  }
}

MappedFile::~MappedFile() { release(); }

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      watch_(std::move(other.watch_)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this == &other) return *this;
  release();
  path_ = std::move(other.path_);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  watch_ = std::move(other.watch_);
  return *this;
}

void MappedFile::release() noexcept {
  watch_ = MappingWatch();
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

// Linux reads and writes at most 2 GiB - 4 KiB in one call.
constexpr size_t kMostAtOnce = size_t{1} << 30;

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  // The counter keeps two writers of one path in this process apart, O_EXCL all others.
  static std::atomic<uint64_t> counter{0};
  constexpr int kTries = 100;
  for (int i = 0; i < kTries && fd_ < 0; ++i) {
    temporary_ = text("{}.{}-{}.tmp", path_, getpid(), counter.fetch_add(1, std::memory_order_relaxed));
    fd_ = open(temporary_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ < 0 && errno != EEXIST) break;
  }
  if (fd_ < 0) fail_as(kind_of(errno), "{}: cannot create {}: {}", path_, temporary_, reason(errno));
  struct stat old{};
  if (stat(path_.c_str(), &old) == 0 && S_ISREG(old.st_mode)) {
    // Where the permissions cannot be kept the new file has the default ones, as any new file.
    [[maybe_unused]] const int ignored = fchmod(fd_, old.st_mode & 07777);
  }
}

AtomicFile::~AtomicFile() { discard(); }

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      fd_(std::exchange(other.fd_, -1)),
      size_(other.size_),
      failed_(other.failed_.load()) {}

void AtomicFile::append(std::span<const std::byte> bytes) {
  if (fd_ < 0 || failed_) fail_as(ErrorKind::kInternal, "{}: append after commit or a failed append", path_);
  bool touched = false;
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t wrote = write(fd_, bytes.data() + at, std::min(bytes.size() - at, kMostAtOnce));
    if (wrote < 0 && may_write_again(bytes.subspan(at), touched)) continue;
    if (wrote <= 0) {
      failed_ = true;
      write_failed(path_, size_ + bytes.size(), wrote < 0 ? errno : ENOSPC);
    }
    at += static_cast<size_t>(wrote);
  }
  size_ += bytes.size();
}

void AtomicFile::append(std::string_view characters) { append(std::as_bytes(std::span(characters))); }

void AtomicFile::reserve(uint64_t bytes) {
  KT_CHECK(fd_ >= 0 && size_ == 0, "{}: reserve() comes first", path_);
  int error = bytes == 0 ? 0 : posix_fallocate(fd_, 0, static_cast<off_t>(bytes));
  // A file system without allocation still has sizes.
  if (error == EOPNOTSUPP || error == EINVAL)
    error = ftruncate(fd_, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  if (error != 0) {
    failed_ = true;
    write_failed(path_, bytes, error);
  }
  size_ = bytes;
}

void AtomicFile::write_at(uint64_t offset, std::span<const std::byte> bytes) {
  KT_CHECK(fd_ >= 0 && offset <= size_ && bytes.size() <= size_ - offset, "{}: {} bytes at {} of {}", path_,
           bytes.size(), offset, size_);
  bool touched = false;
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t wrote = pwrite(fd_, bytes.data() + at, std::min(bytes.size() - at, kMostAtOnce),
                                 static_cast<off_t>(offset + at));
    if (wrote < 0 && may_write_again(bytes.subspan(at), touched)) continue;
    if (wrote <= 0) {
      failed_ = true;
      write_failed(path_, size_, wrote < 0 ? errno : ENOSPC);
    }
    at += static_cast<size_t>(wrote);
  }
}

void AtomicFile::read_at(uint64_t offset, std::span<std::byte> bytes) const {
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t got = pread(fd_, bytes.data() + at, std::min(bytes.size() - at, kMostAtOnce),
                              static_cast<off_t>(offset + at));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0)
      fail("{}: cannot read back {} bytes at {}: {}", path_, bytes.size(), offset,
           got < 0 ? reason(errno) : "end of file");
    at += static_cast<size_t>(got);
  }
}

void AtomicFile::commit() {
  if (fd_ < 0 || failed_) fail_as(ErrorKind::kInternal, "{}: commit after commit or a failed append", path_);
  failed_ = true;  // until all steps are done
  if (fsync(fd_) != 0) write_failed(path_, size_, errno);
  // Some file systems report a full disk only here. Never closed twice: Linux frees the number even on an
  // error.
  if (close(std::exchange(fd_, -1)) != 0 && errno != EINTR) write_failed(path_, size_, errno);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) fail("{}: cannot replace: {}", path_, reason(errno));
  temporary_.clear();
  // Makes the rename durable. Some file systems cannot sync a folder; the file itself is safe by now.
  const Descriptor folder(open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() >= 0 && fsync(folder.get()) != 0 && errno != EINVAL)
    fail("{}: cannot sync its folder: {}", path_, reason(errno));
}

void AtomicFile::discard() noexcept {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
  if (!temporary_.empty()) unlink(temporary_.c_str());
  temporary_.clear();
}

void write_atomically(const std::string& path, std::span<const std::byte> bytes) {
  AtomicFile file(path);
  file.append(bytes);
  file.commit();
}

void write_atomically(const std::string& path, std::string_view characters) {
  write_atomically(path, std::as_bytes(std::span(characters)));
}

void will_need(std::span<const std::byte> bytes) noexcept {
  if (bytes.empty()) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data()) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(bytes.data()) + bytes.size();
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED);
}

std::string read_file(const std::string& path, size_t most) {
  const Descriptor file = open_regular(path);
  std::string out;
  if (const int code = read_to(file, most, out); code >= 0) fail("{}: cannot read: {}", path, reason(code));
  if (out.size() > most) fail("{}: larger than {} bytes, the most that is read of it", path, most);
  return out;
}

std::optional<std::string> read_small_file(const std::string& path) {
  const Descriptor file = open_without_waiting(path);
  struct stat facts{};
  if (file.get() < 0 || fstat(file.get(), &facts) != 0 || !S_ISREG(facts.st_mode)) return std::nullopt;
  std::string out;
  if (read_to(file, kSmallFile, out) >= 0 || out.size() > kSmallFile) return std::nullopt;
  return out;
}

}  // namespace kt::inline base
