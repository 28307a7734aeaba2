// Pieces of rows of any element type as f32, for sums that are made in f32.
#pragma once
#include "base/checked.h"
#include "kernels/plan.h"

namespace kt::inline nn {

struct FloatRows {
  const void* source = nullptr;
  Real type = Real::kF32;
  int64_t stride = 0;              // elements between source rows
  const int32_t* index = nullptr;  // row i is source row index[i]; null: i

  // Rows [first, first + count), columns [column, column + columns), to `out`: [count, round_up(columns, kChunk)],
  // 64-byte aligned, with zeros behind the columns.
  void copy(const Kernels& kernels, int first, int count, int64_t column, int columns, float* out) const {
    const int64_t size = type == Real::kF32 ? 4 : 2, at = index ? 0 : first * stride;
    const ActShape shape{.code = ActCode::kF32, .rows = count, .k_pad = round_up(columns, kChunk)};
    kernels.pack_acts({.source = static_cast<const std::byte*>(source) + (at + column) * size,
                       .type = type,
                       .stride = stride,
                       .index = index ? index + first : nullptr,
                       .m = count,
                       .k = columns,
                       .out = acts_in(shape, reinterpret_cast<std::byte*>(out))});
  }
};

}  // namespace kt::inline nn
