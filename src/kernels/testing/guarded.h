// Memory that notices writes outside it and faults on reads past its end. For tests.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

namespace kt::inline kernels {

// `size` bytes that end `alignment` bytes or less before a page that may not be touched. What lies around
// them is filled with a pattern that intact() looks for.
class Guarded {
 public:
  explicit Guarded(size_t size, size_t alignment = 64) : size_(size) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t room = (size + alignment - 1) / alignment * alignment;
    mapped_ = (room + kFront + page - 1) / page * page;
    void* at = mmap(nullptr, mapped_ + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    start_ = static_cast<uint8_t*>(at);
    total_ = mapped_ + page;
    mprotect(start_ + mapped_, page, PROT_NONE);
    std::memset(start_, kPattern, mapped_);
    data_ = start_ + mapped_ - room;
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(start_, total_); }

  template <class T = std::byte>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  size_t size() const { return size_; }
  bool intact() const {
    for (const uint8_t* p = start_; p < data_; ++p)
      if (*p != kPattern) return false;
    for (const uint8_t* p = data_ + size_; p < start_ + mapped_; ++p)
      if (*p != kPattern) return false;
    return true;
  }

 private:
  static constexpr uint8_t kPattern = 0xA5;
  static constexpr size_t kFront = 256;
  size_t size_, mapped_, total_;
  uint8_t *start_, *data_;
};

}  // namespace kt::inline kernels
