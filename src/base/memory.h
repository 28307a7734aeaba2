// Blocks of bytes for weights, activations and scratch, and how much memory there is. No pools, no arenas.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

namespace kt::inline base {

enum class HugePages {
  kNone,     // ordinary pages
  kAdvise,   // ask for transparent huge pages from 2 MiB on; ordinary pages are fine
  kRequire,  // from the reserved huge page pool (hugetlbfs), or Error(kMemory)
};

struct BufferOptions {
  int node =
      -1;  // the operating system's number of the NUMA node to place the pages on; -1: where first touched
  HugePages huge = HugePages::kAdvise;
};

// Owns bytes, zero-filled, aligned to 64; to a page from 1 MiB on, to 2 MiB where huge pages are asked for
// and it is at least that big. Move-only; moving leaves an empty buffer, and data() stays valid in the new
// owner.
//
// Pages prefer the wanted node but spill to others when it is full: a strict binding would have the process
// killed instead. Where the kernel refuses to bind (containers often forbid it) placement is by first touch,
// and that is logged once. Buffers smaller than a page are never bound.
//
// Error(kMemory), with the bytes wanted and available, if the memory is not to be had. A buffer of 256 MiB or
// more that exceeds available_memory() is refused at once, because overcommit would grant it and kill the
// process later.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes, BufferOptions options = {});
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }  // the bytes asked for
  bool empty() const { return size_ == 0; }

  std::span<std::byte> bytes() { return {data_, size_}; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

  // The buffer as elements; bytes at the end that make no whole T are left out.
  template <typename T>
  std::span<T> as() {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 64);
    return {reinterpret_cast<T*>(data_), size_ / sizeof(T)};
  }
  template <typename T>
  std::span<const T> as() const {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 64);
    return {reinterpret_cast<const T*>(data_), size_ / sizeof(T)};
  }

 private:
  void release() noexcept;

  std::byte* data_ = nullptr;
  size_t size_ = 0;
  size_t mapped_ = 0;  // bytes of the mapping that starts at data_; 0: from the heap
};

// Bytes this process can still use without swapping: the least of the machine's MemAvailable and the headroom
// of every enclosing cgroup (v1 and v2; file cache that can be dropped counts as free). Reads a few files,
// ~100 us. `root` stands before /proc and /sys; other than "" is for tests.
uint64_t available_memory(const std::string& root = "");

// The least of the machine's RAM and the enclosing cgroups' limits.
uint64_t total_memory(const std::string& root = "");

// Bytes of its own that this process has in RAM now: heap, stacks and Buffers, but no mapped files. 0 where
// /proc does not say.
uint64_t own_memory(const std::string& root = "");

// The machine's transparent huge page setting: "always", "madvise", "never", or "unknown".
std::string huge_page_mode(const std::string& root = "");

}  // namespace kt::inline base
