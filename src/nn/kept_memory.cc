#include "nn/kept_memory.h"

#include <utility>

namespace kt::inline nn {

Buffer KeptMemory::take(size_t bytes, int memory_node) {
  {
    const std::lock_guard lock(mutex_);
    // The smallest that will do, but none of more than twice the size: a short call must not hold a long one's.
    Held* best = nullptr;
    for (Held& held : held_)
      if (held.memory_node == memory_node && held.buffer.size() >= bytes && held.buffer.size() / 2 <= bytes &&
          (!best || held.buffer.size() < best->buffer.size()))
        best = &held;
    if (best) {
      Buffer out = std::move(best->buffer);
      std::swap(*best, held_.back());
      held_.pop_back();
      return out;
    }
  }
  return Buffer(bytes, {.node = memory_node});
}

void KeptMemory::give(Buffer buffer, int memory_node) {
  const std::lock_guard lock(mutex_);
  held_.push_back({std::move(buffer), memory_node});
}

size_t KeptMemory::bytes() const {
  const std::lock_guard lock(mutex_);
  size_t sum = 0;
  for (const Held& held : held_) sum += held.buffer.size();
  return sum;
}

void KeptMemory::release() {
  const std::lock_guard lock(mutex_);
  held_.clear();
}

}  // namespace kt::inline nn
