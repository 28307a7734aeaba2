// Products of f32 matrices on one thread through the kernels' f32 route, for callers whose right operand
// already stands in the order of packed weights: 16 columns side by side.
#pragma once
#include <cstdint>

#include "base/memory.h"
#include "kernels/plan.h"

namespace kt {

// Holds the memory a product needs, for up to most_m rows and most_k columns.
class F32Product {
 public:
  F32Product(int most_m, int most_k);

  struct Args {
    const float* a = nullptr;  // [m, k]
    int64_t a_stride = 0;
    int m = 0, k = 0;
    const float* b = nullptr;  // [blocks, k, 16], blocks b_stride floats apart, 64-byte aligned
    int64_t b_stride = 0;
    int blocks = 0;
    float* out = nullptr;  // [m, 16 * blocks]
    int64_t out_stride = 0;
  };
  // out[i, 16 * j + r] = sum over c of a[i, c] * b[j, c, r]. k is a multiple of kChunk. Every element's sum
  // runs over c in order, whatever else is in the call.
  void run(const Args& args);

 private:
  Plan plan(int m, int k, int blocks, int64_t b_stride, Packing& packing) const;

  const Kernels& kernels_ = kernels();
  Buffer memory_;
};

}  // namespace kt
