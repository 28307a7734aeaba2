// Kernels of single rows of f32 beside the products: norms, rotations, scores of routers, rows of the cache.
#pragma once
#include <cstdint>

#include "kernels/attention.h"

namespace kt {

// Heads of one token, turned in place: pairs (i, i + half), or (2 i, 2 i + 1) where interleaved, of each head's first
// 2 * half numbers.
struct RotateArgs {
  float* x = nullptr;
  int heads = 0;
  int64_t stride = 0;  // between heads
  int half = 0;
  bool interleaved = false;
  const float* cosines = nullptr;  // [half]
  const float* sines = nullptr;
};

// Neighbouring tokens' keys or values of one head, for a block of the cache (attention.h).
struct CacheRows {
  KvType type = KvType::kBf16;
  bool keys = false;  // else values
  const float* rows = nullptr;
  int64_t stride = 0;  // between rows
  int count = 0;
  int slot = 0;  // of the first one; slot + count <= kKvBlock
  int width = 0;
  int width_pad = 0;  // of the block; columns from `width` on become zeros up to a multiple of 16 of them
  void* block = nullptr;
  float* scales = nullptr;  // [kKvBlock], for kS8: of a row, its largest size / 127
};

// The same bits on every ISA: sums are of 16 lanes, joined in one order.
struct RowKernels {
  // y = x / sqrt(mean(x^2) + eps) * weight, n numbers; y may be x.
  void (*norm)(const float* x, const float* weight, float eps, int n, float* y) noexcept;
  void (*rotate)(const RotateArgs&) noexcept;
  void (*softmax)(float* x, int n) noexcept;  // n > 0; numbers far below the largest become 2^-125, not 0
  void (*sigmoid)(float* x, int n) noexcept;
  void (*write_cache)(const CacheRows&) noexcept;
};

}  // namespace kt
