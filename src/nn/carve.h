// Pieces of one worker's memory, each on its own cache lines.
#pragma once
#include <cstddef>

#include "base/checked.h"

namespace kt::inline nn {

// Without memory, only their sizes.
class Carve {
 public:
  explicit Carve(std::byte* memory) : memory_(memory) {}
  template <typename T>
  T* take(size_t count) {
    auto* out = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += round_up(count * sizeof(T), size_t{64});
    return out;
  }
  size_t used() const { return used_; }

 private:
  std::byte* memory_;
  size_t used_ = 0;
};

}  // namespace kt::inline nn
