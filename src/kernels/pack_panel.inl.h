// Numbers as the right operand of a product in bf16 (transpose.h): factors of adapters, and rows of activations over
// which gradients are summed.
#pragma once
#include "kernels/acts.inl.h"
#include "kernels/isa/squares.h"
#include "kernels/transpose.h"

namespace KT_ISA_NAMESPACE {
namespace {

// A square of f32 numbers, rows of K by the lanes of a block, to its 16 / (kStep / 2) steps.
template <class I>
KT_INLINE void store_square(const float* square, uint8_t* to) {
  constexpr int kNumbers = I::kStep / 2;
  for (int k = 0; k < kBlockRows; k += kNumbers, to += kBlockRows * I::kStep)
    unroll<kParts>([&](auto i) __attribute__((always_inline)) {
      F32 numbers[kNumbers];
      for (int j = 0; j < kNumbers; ++j)
        numbers[j] = Isa::load(square + (k + j) * kBlockRows + i * Isa::kLanes);
      I::store_bf16_step(to + i * kPartBytes, numbers);
    });
}

// Up to 16 numbers; without a call for as few as a rank often is.
KT_INLINE void copy_some(float* to, const float* from, int count) {
  int i = 0;
  for (; i + 4 <= count; i += 4) __builtin_memcpy(to + i, from + i, 4 * sizeof(float));
  for (; i < count; ++i) to[i] = from[i];
}

// Rows [r, r + 16) of K by columns [c, c + 16) of one block.
template <Real kType>
KT_INLINE void load_square(const PanelArgs& args, int r, int c, float* square) {
  constexpr int kSize = kType == Real::kF32 ? 4 : 2;
  const auto* from = static_cast<const uint8_t*>(args.from);
  const int rows = args.rows - r < kBlockRows ? args.rows - r : kBlockRows;
  for (int i = 0; i < kBlockRows; ++i, square += kBlockRows) {
    if (i >= rows) {
      __builtin_memset(square, 0, kBlockRows * sizeof(float));
      continue;
    }
    const uint8_t* row = from + (args.index ? args.index[r + i] : r + i) * args.ld * kSize;
    if (kType == Real::kF32 && c + kUnit > args.columns) {
      __builtin_memset(square, 0, kBlockRows * sizeof(float));
      copy_some(square, reinterpret_cast<const float*>(row) + c, args.columns - c);
      continue;
    }
    const Unit u =
        c + kUnit <= args.columns ? load_unit<kType>(row, c) : load_last_unit<kType>(row, c, args.columns);
    unroll<kParts>([&](auto p)
                       __attribute__((always_inline)) { Isa::store(square + p * Isa::kLanes, u.v[p]); });
  }
}

// The same where rows and columns change places in memory.
KT_INLINE void load_square_across(const PanelArgs& args, int r, int c, float* square) {
  alignas(64) float lines[kBlockRows * kBlockRows];
  const auto* from = static_cast<const float*>(args.from) + c * args.ld + r;
  const int columns = args.columns - c < kBlockRows ? args.columns - c : kBlockRows;
  const int rows = args.rows - r < kBlockRows ? args.rows - r : kBlockRows;
  if (columns < kBlockRows || rows < kBlockRows) __builtin_memset(lines, 0, sizeof lines);
  for (int i = 0; i < columns; ++i)
    if (rows == kBlockRows)
      __builtin_memcpy(lines + i * kBlockRows, from + i * args.ld, kBlockRows * sizeof(float));
    else
      copy_some(lines + i * kBlockRows, from + i * args.ld, rows);
  transpose_words(reinterpret_cast<const uint8_t*>(lines), reinterpret_cast<uint8_t*>(square));
}

template <class I>
void pack_panel(const PanelArgs& args) noexcept {
  if constexpr (I::kBf16Product) {
    constexpr int64_t kSquareBytes = kBlockRows * kBlockRows * 2;
    alignas(64) float square[kBlockRows * kBlockRows];
    auto* block = reinterpret_cast<uint8_t*>(args.out);
    for (int c = 0; c < args.columns; c += kBlockRows, block += args.out_stride) {
      uint8_t* to = block;
      int r = 0;
      for (; r < args.rows; r += kBlockRows, to += kSquareBytes) {
        if (args.across)
          load_square_across(args, r, c, square);
        else if (args.type == Real::kF32)
          load_square<Real::kF32>(args, r, c, square);
        else if (args.type == Real::kBf16)
          load_square<Real::kBf16>(args, r, c, square);
        else
          load_square<Real::kF16>(args, r, c, square);
        store_square<I>(square, to);
      }
      if (r < args.k_pad) __builtin_memset(to, 0, static_cast<size_t>(args.k_pad - r) * kBlockRows * 2);
    }
  }
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
