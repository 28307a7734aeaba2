// Kernels of symmetric rank-k updates, H += X^T X, and of the products that are made with H: the order of the
// packed operand, and the functions every ISA exports, in a table of their own.
#pragma once
#include <cstddef>
#include <cstdint>

#include "formats/layout.h"
#include "kernels/table.h"

namespace kt::inline kernels {

inline constexpr int kGramRows = 512;  // rows of X in a panel: sums stay in registers as long
inline constexpr int kGramSide = 32;   // columns of a strip; H is made in squares of this side
inline constexpr int kGramGroup = 32;  // rows are padded with zeros to multiples of this

// Rows of X as the operand of both sides of X^T X. A panel of kGramRows rows: [columns / 16] blocks of [rows
// in the order of one block of 16 packed weights], that is [rows / step][16 columns][step], where a step is
// what the ISA's product takes of K: 2 or 4 numbers in bf16, one in f32. Numbers are rounded to bf16 either
// way. Columns are padded with zeros to multiples of kGramSide.
struct GramPackArgs {
  const void* const* rows = nullptr;  // [count] starts of rows of X
  Real type = Real::kBf16;
  const float* factors = nullptr;  // [count] of all numbers of a row; null: 1
  int count = 0;                   // up to kGramGroup; the group is filled up with zeros
  int columns = 0;
  int group = 0;               // of the panel
  std::byte* panel = nullptr;  // 64-byte aligned
};

// The square of H whose first row and column are strips row0 and column0 (row0 >= column0): what lies on or
// below the diagonal is added to.
struct GramArgs {
  const std::byte* panels = nullptr;  // one after the other
  int rows = 0;                       // of X; all panels but the last are full
  int columns = 0;                    // of X, not padded
  int row0 = 0, row_strips = 0;
  int column0 = 0, column_strips = 0;
  float* sums = nullptr;           // [row_strips, column_strips, kGramSide, kGramSide], scratch
  std::byte* strip = nullptr;      // gram_strip_bytes(), scratch
  bool fresh = true, fold = true;  // sums start from zero; they are added to `out` at the end
  float* out = nullptr;            // [columns, ld]
  int64_t ld = 0;
};

// out[i, 16 * j + r] = sum over c of a[i, c] * b[j, c, r]: f32, for a right operand in the order of f32
// weights.
struct ProductF32Args {
  const float* a = nullptr;  // [m, k]
  int64_t a_stride = 0;
  int m = 0, k = 0;
  const float* b = nullptr;  // [blocks, k, 16], blocks b_stride floats apart
  int64_t b_stride = 0;
  int blocks = 0;
  float* out = nullptr;  // [m, 16 * blocks]
  int64_t out_stride = 0;
};
inline constexpr int kProductK = 256;  // of K at once: sums wait in `out`

// What 16 rows that stand side by side share with the columns of a span:
//   value  = code * scale - min   for lowest <= code <= highest
//   stored = code + offset
struct RoundingLanes {
  float scale[kBlockRows], divisor[kBlockRows], min[kBlockRows];
  float lowest[kBlockRows], highest[kBlockRows], offset[kBlockRows];
};

// One column of all blocks of 16 rows.
struct RoundArgs {
  const RoundingLanes* lanes = nullptr;  // [blocks]
  const float* values = nullptr;         // [16] of a block, `stride` floats from one block to the next
  float* rest = nullptr;                 // the same: less what the codes stand for
  int64_t stride = 0;
  int blocks = 0;
  uint8_t* codes = nullptr;  // [blocks, 16]
};

// Some columns of one block of 16 rows, against scales that may be other than their own.
struct ScaleErrorArgs {
  const RoundingLanes* lanes = nullptr;  // of which lowest and highest count
  const float* scale = nullptr;          // [16], not 0
  const float* values = nullptr;         // [columns, 16]
  const float* weight = nullptr;         // [columns]
  int columns = 0;
  float* error = nullptr;  // [16]
};

struct GramKernels {
  int code_bytes;  // of a packed number
  // False if a number is not finite, or so large that rounding it to bf16 might make it so; the panel's group
  // is not usable then.
  bool (*pack)(const GramPackArgs&) noexcept;
  // A sum runs over the rows in order, in f32, and is then added to `out`: the same bits whatever square it
  // is computed in and however rows are cut into calls at panels.
  void (*add)(const GramArgs&) noexcept;
  // Every sum runs over c in order, whatever else is in the call.
  void (*product_f32)(const ProductF32Args&) noexcept;
  // out[b, 16] += sum over i < count, in order, of factors[i] * x[b, i, 16]; blocks `stride` floats apart.
  void (*add_lanes)(const float* factors, int count, const float* x, float* out, int64_t stride,
                    int blocks) noexcept;
  void (*round)(const RoundArgs&) noexcept;
  // Sums of weight * (value - code * scale)^2, without mins.
  void (*scale_error)(const ScaleErrorArgs&) noexcept;
};
// Those that belong to a table of best_kernels() or kernels_named().
const GramKernels& gram_kernels(const Kernels& table);

constexpr int64_t gram_strip_bytes() { return int64_t{kGramSide} * kGramRows * 2; }
constexpr int64_t gram_panel_bytes(int columns, int code_bytes) {
  return (int64_t{columns} + kGramSide - 1) / kGramSide * kGramSide * kGramRows * code_bytes;
}

}  // namespace kt::inline kernels
