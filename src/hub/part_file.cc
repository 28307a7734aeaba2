#include "hub/part_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "base/sha256.h"
#include "hub/sha1.h"

namespace kt::inline hub {
namespace {

std::string reason(int code) { return std::generic_category().message(code); }

std::string map_path(const std::string& path) { return path + ".map"; }

// First line of a map; behind it a character for each piece, '1' if it is there.
std::string map_head(uint64_t size, uint64_t piece) { return text("kt download 1 {} {}\n", size, piece); }

size_t pieces_of(uint64_t size, uint64_t piece) { return static_cast<size_t>((size + piece - 1) / piece); }

// The pieces that are there; none where the map is another one's or the file has another size.
std::vector<char> read_map(const std::string& path, uint64_t size, uint64_t piece) {
  std::vector<char> out(pieces_of(size, piece), 0);
  std::error_code code;
  if (std::filesystem::file_size(path, code) != size || code) return out;
  const std::string map = read_small_file(map_path(path)).value_or(""), head = map_head(size, piece);
  if (!map.starts_with(head) || map.size() != head.size() + out.size()) return out;
  for (size_t i = 0; i < out.size(); ++i) out[i] = map[head.size() + i] == '1' ? 1 : 0;
  return out;
}

Descriptor open_to_write(const std::string& path) {
  Descriptor out(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
  if (!out) fail("{}: cannot be written: {}", path, reason(errno));
  return out;
}

void write_all(int fd, const std::string& path, uint64_t at, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(at));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) {
      const bool full = errno == ENOSPC || errno == EDQUOT || errno == EFBIG;
      fail_as(full ? ErrorKind::kMemory : ErrorKind::kInput, "{}: cannot be written: {}; what came is kept",
              path, reason(errno));
    }
    at += static_cast<uint64_t>(put);
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
}

}  // namespace

FolderLock::FolderLock(const std::string& path) : path_(path), file_(open_to_write(path)) {}

bool FolderLock::try_lock() { return ::flock(file_.get(), LOCK_EX | LOCK_NB) == 0; }

void FolderLock::lock() {
  while (::flock(file_.get(), LOCK_EX) != 0)
    if (errno != EINTR) fail("{}: cannot be locked: {}", path_, reason(errno));
}

PartFile::PartFile(std::string path, uint64_t size, uint64_t piece)
    : path_(std::move(path)), size_(size), piece_(piece), done_(read_map(path_, size, piece)) {
  file_ = open_to_write(path_);
  left_ = static_cast<size_t>(std::ranges::count(done_, 0));
  if (left_ == done_.size()) {
    // Anew. An old map must not outlive the bytes that it speaks of.
    ::unlink(map_path(path_).c_str());
    if (::ftruncate(file_.get(), static_cast<off_t>(size)) != 0)
      fail_as(ErrorKind::kMemory, "{}: cannot have {} bytes: {}", path_, size, reason(errno));
  }
  map_ = open_to_write(map_path(path_));
  const std::string head = map_head(size, piece) + std::string(done_.size(), '0');
  if (left_ == done_.size()) write_all(map_.get(), map_path(path_), 0, std::as_bytes(std::span(head)));
}

uint64_t PartFile::bytes_there(const std::string& path, uint64_t size, uint64_t piece) {
  const std::vector<char> done = read_map(path, size, piece);
  uint64_t out = 0;
  for (size_t i = 0; i < done.size(); ++i)
    if (done[i]) out += std::min(size, (i + 1) * piece) - i * piece;
  return out;
}

uint64_t PartFile::end_of(size_t piece) const { return std::min(size_, (piece + 1) * piece_); }

void PartFile::write(uint64_t at, std::span<const std::byte> bytes) {
  KT_CHECK(at + bytes.size() <= size_);
  write_all(file_.get(), path_, at, bytes);
}

void PartFile::finish(size_t piece) {
  KT_CHECK(!done_[piece]);
  const std::byte one{'1'};
  write_all(map_.get(), map_path(path_), map_head(size_, piece_).size() + piece, {&one, 1});
  done_[piece] = 1;
  --left_;
}

void PartFile::sync() {
  if (::fsync(file_.get()) != 0) fail("{}: cannot be written: {}", path_, reason(errno));
}

void PartFile::forget_map() { ::unlink(map_path(path_).c_str()); }

void PartFile::discard() {
  forget_map();
  ::unlink(path_.c_str());
}

std::string wrong_bytes(const std::string& path, const HubFile& expected,
                        const std::function<void(uint64_t)>& advance) {
  const Descriptor file = open_regular(path);
  std::vector<std::byte> block(size_t{1} << 20);
  Sha256 sha256;
  Sha1 sha1;
  const std::string head = git_blob_head(expected.size);
  sha1.add(std::as_bytes(std::span(head)));
  uint64_t bytes = 0;
  while (true) {
    const ssize_t got = ::read(file.get(), block.data(), block.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("{}: cannot be read: {}", path, reason(errno));
    if (got == 0) break;
    const std::span<const std::byte> part = std::span(block).first(static_cast<size_t>(got));
    bytes += part.size();
    if (advance) advance(part.size());
    if (!expected.sha256.empty())
      sha256.add(part);
    else if (!expected.git_sha1.empty())
      sha1.add(part);
  }
  if (bytes != expected.size) return text("expected {} bytes, found {}", expected.size, bytes);
  if (expected.sum().empty()) return "";
  const bool large = !expected.sha256.empty();
  const std::string found = large ? sha256.hex() : sha1.hex();
  if (found == expected.sum()) return "";
  return text("expected {} {}, found {}", large ? "sha256" : "git sha1", expected.sum(), found);
}

}  // namespace kt::inline hub
