// Products with low-rank factors, and the sums that are their gradients, as training makes them: of bf16 operands where
// the layer's own products are (a tile unit then does these too), else in f32. Factors and results are f32 either way.
// A number does not depend on the other rows and columns of a call.
#pragma once
#include <cstddef>

#include "base/checked.h"
#include "kernels/plan.h"
#include "kernels/transpose.h"

namespace kt::inline nn {

class FactorProducts {
 public:
  static constexpr int kBf16Rows = 48;  // fewer are hardly worth packing, and show what rounding does
  static constexpr int kBf16Rank = 8;
  static constexpr int kMostK = 1024;    // of a product
  static constexpr int kMostRows = 512;  // of rows that are summed over, at once

  // bf16: asks for such operands; f32 where the table has no such product.
  FactorProducts(const Kernels& kernels, bool bf16);
  bool bf16() const { return bf16_; }

  // A factor, or part of one, as the right operand [k, 16 * blocks] of a product: rows of K of plain row blocks
  // (layout.h) that stand out_stride bytes apart. Number (i, lane) stands at from[i * k_step + lane * lane_step], one
  // of which is 1; there are `lanes` of these, then zeros, and zeros up to k_pad.
  struct Turn {
    const float* from = nullptr;
    int64_t k_step = 0, lane_step = 0;
    int k = 0, lanes = 0, blocks = 0;
    int k_pad = 0;  // a multiple of 16
    std::byte* out = nullptr;
    int64_t out_stride = 0;
  };
  void turn(const Turn& of) const noexcept;
  // Of one row of K of a row block, and of a whole operand whose K is padded for a product.
  int64_t row_bytes() const { return kBlockRows * (bf16_ ? 2 : 4); }
  int64_t block_bytes(int k) const { return round_up(k, kChunk) * row_bytes(); }

  struct Product {
    // [m, k]: row i is source row (index ? index[i] : i); in f32 no index, no other types
    const void* a = nullptr;
    Real type = Real::kF32;
    int64_t a_stride = 0;  // elements
    const int32_t* index = nullptr;
    int m = 0, k = 0;
    const std::byte* turned = nullptr;  // block_bytes(k) apart
    int blocks = 0;
    float* out = nullptr;  // [m, 16 * blocks]
    int64_t out_stride = 0;
  };
  // `scratch`: product_bytes of as many rows and as large a k.
  void multiply(const Product& product, std::byte* scratch) const noexcept;
  size_t product_bytes(int m, int k) const;
  // The same of rows that are packed for a product in bf16, with an operand of all their k_pad.
  void multiply_packed(const Acts& rows, int m, const std::byte* turned, int blocks, float* out,
                       int64_t out_stride, std::byte* scratch) const noexcept;
  Acts pack(const Product& product, std::byte* memory) const noexcept;  // of its a; memory: acts_bytes()
  size_t acts_bytes(int m, int k) const;
  ActShape acts_shape(int m, int k) const;

  // transpose.h says what; in bf16 sums are added once for each kMostRows rows. `scratch`: sum_bytes of as many columns
  // of a. Narrow operands are summed in f32 either way: packing them would take longer.
  void outer_sum(const OuterSumArgs& args, std::byte* scratch) const noexcept;
  size_t sum_bytes(int a_columns) const;

 private:
  struct SumScratch;
  Packing panel(int k) const;
  SumScratch sum_scratch(int a_columns) const;
  void sum_rows(const OuterSumArgs& args, int first, int rows, std::byte* scratch) const noexcept;

  const Kernels& kernels_;
  const BackKernels& back_;
  bool bf16_;
  Packing panel_;  // of one row block of kChunk columns
};

}  // namespace kt::inline nn
