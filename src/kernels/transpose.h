// Kernels of backward passes over packed weights: columns of a matrix as rows of a plain panel, which the
// products of the other tables multiply as they multiply weights, sums over tokens of outer products, and the way back
// through the activation.
#pragma once
#include <cstddef>
#include <cstdint>

#include "formats/layout.h"
#include "kernels/table.h"

namespace kt::inline kernels {

// Columns [first, first + kChunk) of `count` row blocks, transposed: W [16 * count, k] becomes four row blocks of
// W^T, packed as a plain matrix of code kBf16 or kF32 (layout.h) whose K are the rows of W. So dX = dY W is
// multiply(panel, dY) by many_bf16 or many_f32 of that plain layout; no second packing of weights exists.
// Values are (code - bias) * scale - min in f32, then rounded to the panel's code: to the bit what many_f32 and
// many_bf16 make of them. Rows that pad the last block are zeros; columns that pad K hold anything finite, which makes
// sums that nobody asks for.
struct TransposeArgs {
  const Packing* packing = nullptr;
  const std::byte* blocks = nullptr;
  int64_t stride = 0;  // bytes from one row block to the next; 0: packing->block_bytes
  int count = 0;       // row blocks
  int first = 0;       // column, a multiple of kChunk
  // The panel: block c of 16 columns begins at c * out_stride. Rows [row, row + 16 * count) of its K are written
  // (row is a multiple of 16), and with `last` zeros up to the next multiple of kChunk.
  int row = 0;
  bool last = true;
  std::byte* out = nullptr;  // 64-byte aligned
  int64_t out_stride = 0;
};

// A matrix of numbers as the right operand of a product in bf16: its rows are K, its columns the output's. Number
// (r, c) stands at row (index ? index[r] : r) of `from`, column c; `across`: at row c, column r (f32, no index).
struct PanelArgs {
  const void* from = nullptr;
  Real type = Real::kF32;
  int64_t ld = 0;  // elements from one row of `from` to the next
  const int32_t* index = nullptr;
  bool across = false;
  int rows = 0, columns = 0;
  // Row blocks of a plain matrix of code kBf16 (layout.h): block c of 16 columns begins at c * out_stride. Zeros fill
  // the last block, and K up to k_pad, a multiple of 16 (64 where a product begins with it).
  int k_pad = 0;
  std::byte* out = nullptr;  // 64-byte aligned
  int64_t out_stride = 0;
};

// out[i, c] += factor * sum over t of a[t, i] * b[t, c], t in order, f32: each sum is made from zero by fused
// multiply-adds and then added by one, so it depends neither on the other columns of the call nor on how these are cut.
struct OuterSumArgs {
  const float* a = nullptr;  // [rows, a_ld]: `a_columns` of it, few (a rank)
  int64_t a_ld = 0;
  int a_columns = 0;
  const void* b = nullptr;  // row t is source row (index ? index[t] : t)
  Real b_type = Real::kF32;
  int64_t b_ld = 0;  // elements
  int b_columns = 0;
  const int32_t* index = nullptr;  // [rows] or null
  int rows = 0;
  float factor = 1;
  float* out = nullptr;  // element (i, c) at i * out_ld + c * out_step
  int64_t out_ld = 0, out_step = 1;
};

// Columns of gate and up before biases and activation, with the gradient of what the activation made of them. Blocks of
// 16 columns of gate (or of up) stand `step` elements apart in a row, those of the results out_step.
struct ActivateBackArgs {
  const void* gate = nullptr;  // bf16 or f32
  const void* up = nullptr;
  Real type = Real::kF32;
  int64_t stride = 0, step = kBlockRows;  // elements: between rows, between blocks
  const float* gate_bias = nullptr;       // [whole blocks] or null
  const float* up_bias = nullptr;
  Activation activation;
  int m = 0, columns = 0;
  int blocks = 0;                   // written; results past `columns` are zeros
  const float* weights = nullptr;   // [m]
  const float* mid_grad = nullptr;  // [m, ld], before the weights
  int64_t ld = 0;
  float* mid = nullptr;        // [m, ld]: f(gate, up)
  float* gate_grad = nullptr;  // weights * mid_grad * derivative
  float* up_grad = nullptr;
  int64_t out_ld = 0, out_step = kBlockRows;
  float* weights_grad = nullptr;  // [m]: += sum of mid_grad * mid
};

// Any layout: args.packing says which.
struct BackKernels {
  void (*transpose_bf16)(const TransposeArgs&) noexcept;  // null where the ISA has no bf16 product
  void (*transpose_f32)(const TransposeArgs&) noexcept;
  void (*pack_panel)(const PanelArgs&) noexcept;  // null likewise
  void (*outer_sum)(const OuterSumArgs&) noexcept;
  void (*activate_back)(const ActivateBackArgs&) noexcept;
};
// Those that belong to a table of best_kernels() or kernels_named().
const BackKernels& back_kernels(const Kernels& table);

}  // namespace kt::inline kernels
