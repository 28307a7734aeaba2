// Files as whole things: mapped to read, replaced atomically to write. Every error names the path and the
// reason.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/mapped_faults.h"

namespace kt::inline base {

// An open file or socket that closes itself. Move-only; -1: none.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  void reset();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Opens a regular file to read. Error(kInput) naming the path if it is missing, unreadable or something else: a
// FIFO or a device is refused, never waited for. What reads files by a name from outside opens them here.
Descriptor open_regular(const std::string& path);

// Error(kInput) naming `path` if a symbolic link stands there: for names that are written or removed, where a
// link would lead out of the folder that was meant. Absent is fine.
void refuse_link(const std::string& path);

// A regular file mapped read-only for the life of the object. Pages are read when touched; where the file has
// become shorter meanwhile they are zeros, and mapped_faults.h knows. Replace files (AtomicFile), never rewrite
// them. Move-only.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(
      const std::string& path);  // as open_regular(); Error(kMemory) if there is no room for it
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const std::byte> bytes() const { return {data_, size_}; }  // empty for an empty file
  size_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  void release() noexcept;

  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  MappingWatch watch_;
};

// Writes a new file, or a new version of one, so that other programs and crashes see the old bytes or all of
// the new ones and nothing between. Writes go to a temporary in the same folder; commit() makes it durable
// and renames it over `path`. Without commit() the temporary is removed and an old file stays as it was. An
// existing file's permission bits are kept; a symbolic link at `path` is replaced, not followed. Move-only;
// one thread at a time.
//
// A full disk, a quota and a file size limit are Error(kMemory) with the path and the bytes wanted; anything
// else that fails is Error(kInput). After a failed append() only destruction makes sense: commit() refuses.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&& other) = delete;

  // Adds bytes at the end. One system call each, so gather small pieces first.
  void append(std::span<const std::byte> bytes);
  void append(std::string_view characters);
  uint64_t size() const { return size_; }  // bytes appended or reserved so far
  const std::string& path() const { return path_; }

  // The other way to fill a file: reserve its whole size once, before any append(), then write and read
  // pieces of it in any order, from several threads. The disk space is claimed by reserve() where the file
  // system can do that.
  void reserve(uint64_t bytes);
  void write_at(uint64_t offset, std::span<const std::byte> bytes);
  void read_at(uint64_t offset, std::span<std::byte> bytes) const;

  // fsync, rename, fsync of the folder. At most once; nothing may be appended afterwards.
  void commit();

 private:
  void discard() noexcept;

  std::string path_;
  std::string temporary_;  // empty once renamed or removed
  int fd_ = -1;
  uint64_t size_ = 0;
  std::atomic<bool> failed_ = false;
};

// An AtomicFile of exactly these bytes, committed.
void write_atomically(const std::string& path, std::span<const std::byte> bytes);
void write_atomically(const std::string& path, std::string_view characters);

// After a write that failed, by errno: whether to try once more. Bytes of a mapped file that has become shorter
// are the zeros that reading them would give (mapped_faults.h); `touched`: that was tried.
bool may_write_again(std::span<const std::byte> rest, bool& touched) noexcept;

// Asks the kernel to start reading these mapped bytes, without waiting. A hint: whatever happens, nothing
// fails.
void will_need(std::span<const std::byte> bytes) noexcept;

// A whole regular file of at most `most` bytes as text. Error(kInput) naming it otherwise.
std::string read_file(const std::string& path, size_t most);

// The same of a small one, or nullopt if it cannot be read or is larger than kSmallFile. Works for /proc and
// /sys, whose files have no size.
inline constexpr size_t kSmallFile = size_t{64} << 20;
std::optional<std::string> read_small_file(const std::string& path);

}  // namespace kt::inline base
