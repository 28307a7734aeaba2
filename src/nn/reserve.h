// Buffers of steps that grow to the largest one seen.
#pragma once
#include "base/memory.h"

namespace kt::inline nn {

// How far they grow ahead of what a step needs: steps of slowly rising sizes do not allocate each time.
constexpr size_t with_reserve(size_t needed) { return needed + needed / 4; }

// At least `needed` bytes; what was in it is lost. The old ones are given back first, to be part of the new.
inline void grow(Buffer& buffer, size_t needed, BufferOptions options = {}) {
  if (buffer.size() >= needed) return;
  buffer = Buffer();
  buffer = Buffer(with_reserve(needed), options);
}

}  // namespace kt::inline nn
