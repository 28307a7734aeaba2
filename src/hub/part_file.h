// A file on its way: its bytes come in pieces, in any order, and a map beside it says which are there, so that whoever
// comes after a crash goes on. Whether they are the right ones is for the sum to say.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "hub/repository.h"

namespace kt::inline hub {

// Held while it lives; a crash gives it back.
class FolderLock {
 public:
  // Waits for another holder; `on_wait` is told once before that.
  template <typename Wait>
  FolderLock(const std::string& path, Wait&& on_wait) : FolderLock(path) {
    if (try_lock()) return;
    on_wait();
    lock();
  }

 private:
  explicit FolderLock(const std::string& path);
  bool try_lock();
  void lock();

  std::string path_;
  Descriptor file_;
};

class PartFile {
 public:
  // Opens the part at `path`, or begins one of `size` bytes in pieces of `piece`. A map of other sizes is no map.
  PartFile(std::string path, uint64_t size, uint64_t piece);

  // Pieces of the part at `path` that are there, in bytes, without opening it for more.
  static uint64_t bytes_there(const std::string& path, uint64_t size, uint64_t piece);

  size_t pieces() const { return done_.size(); }
  bool has(size_t piece) const { return done_[piece] != 0; }
  bool is_whole() const { return left_ == 0; }
  uint64_t begin_of(size_t piece) const { return piece * piece_; }
  uint64_t end_of(size_t piece) const;
  uint64_t size() const { return size_; }
  const std::string& path() const { return path_; }

  // Error(kMemory) when the disk is full. The map learns of a piece once its bytes are written.
  void write(uint64_t at, std::span<const std::byte> bytes);
  void finish(size_t piece);

  void sync();        // to the disk
  void forget_map();  // the file goes its own way from here
  void discard();     // both

 private:
  std::string path_;
  uint64_t size_, piece_;
  Descriptor file_, map_;
  std::vector<char> done_;
  size_t left_ = 0;
};

// Whether the bytes of a file are those that the hub lists, by size and sum; what they are instead otherwise, "" if all
// is well. A file without a sum is judged by its size.
// `advance`, if given, is told of bytes as they are read.
std::string wrong_bytes(const std::string& path, const HubFile& expected,
                        const std::function<void(uint64_t)>& advance = {});

}  // namespace kt::inline hub
