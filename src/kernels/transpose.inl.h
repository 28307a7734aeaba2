// Columns of packed weights as rows of a plain panel (transpose.h): 16 rows x 64 columns are widened by what the
// products widen with, then turned square by square. Nothing is compiled for a layout here.
//
// Into f32 that takes a fifth of the time in which 64 rows are multiplied with the panel, 0.25 to 0.4 of 1.4 ns a
// weight on a shared Xeon with AVX-512 and 0.5 of 2.4 with AVX2. Most of it is the widening: bf16 weights, which need
// next to none, take 0.2 and 0.3. bf16 panels are turned as words of two numbers, half the shuffles.
#pragma once
#include "kernels/isa/squares.h"
#include "kernels/transpose.h"
#include "kernels/widenings.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

// square(from, to) transposes 16 x 16 numbers in the order of a plain row block.
template <class Number, class Square>
KT_INLINE void transpose_blocks(const kt::TransposeArgs& args, int number_bytes, Widen<Number> widen,
                                Square&& square) {
  constexpr int kRows = kt::kBlockRows, kChunk = kt::kChunk;
  const kt::Packing& p = *args.packing;
  const int64_t stride = args.stride ? args.stride : static_cast<int64_t>(p.block_bytes);
  const int64_t square_bytes = int64_t{kRows} * kRows * number_bytes;
  const auto* block = reinterpret_cast<const uint8_t*>(args.blocks);
  auto* out = reinterpret_cast<uint8_t*>(args.out) + args.row / kRows * square_bytes;
  alignas(64) uint8_t strip[kRows * kChunk * 4];
  for (int b = 0; b < args.count; ++b, block += stride, out += square_bytes) {
    widen(p, block, args.first, args.first + kChunk, reinterpret_cast<Number*>(strip));
    for (int c = 0; c < kChunk / kRows; ++c) square(strip + c * square_bytes, out + c * args.out_stride);
  }
  const int rows = args.row + args.count * kRows, missing = (kChunk - rows % kChunk) % kChunk / kRows;
  if (args.last)
    for (int c = 0; c < kChunk / kRows; ++c)
      __builtin_memset(out + c * args.out_stride, 0, static_cast<size_t>(missing * square_bytes));
}

void transpose_f32(const kt::TransposeArgs& args) noexcept {
  transpose_blocks(args, 4, kWidenF32[static_cast<size_t>(args.packing->layout)],
                   [](const uint8_t* from, uint8_t* to)
                       __attribute__((always_inline)) { transpose_words(from, to); });
}

template <class I>
void transpose_bf16(const kt::TransposeArgs& args) noexcept {
  if constexpr (I::kBf16Product)
    transpose_blocks(args, 2, kWidenBf16[static_cast<size_t>(args.packing->layout)],
                     [](const uint8_t* from, uint8_t* to)
                         __attribute__((always_inline)) { transpose_steps<I>(from, to); });
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
