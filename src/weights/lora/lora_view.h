// A factor of an adapter, or a part of one, seen where it lies in its file.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "weights/tensor.h"

namespace kt::inline weights {

// A matrix that lies anywhere in a tensor; strides count values.
struct LoraView {
  const std::byte* data = nullptr;
  int64_t rows = 0, columns = 0, row_stride = 0, column_stride = 1;
  size_t size = 4;  // of a value
  Dtype dtype = Dtype::kF32;

  const std::byte* at(int64_t row, int64_t column) const {
    return data + static_cast<size_t>(row * row_stride + column * column_stride) * size;
  }
  LoraView part(int64_t row, int64_t row_count, int64_t column, int64_t column_count) const {
    LoraView out = *this;
    out.data = at(row, column);
    out.rows = row_count;
    out.columns = column_count;
    return out;
  }
  bool is_zero() const {
    static constexpr std::byte kZero[8] = {};
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c)
        if (std::memcmp(at(r, c), kZero, size) != 0) return false;
    return true;
  }
  bool equals(const LoraView& other) const {
    if (rows != other.rows || columns != other.columns || size != other.size) return false;
    if (data == other.data && row_stride == other.row_stride) return true;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c)
        if (std::memcmp(at(r, c), other.at(r, c), size) != 0) return false;
    return true;
  }
};

// A tensor of two dimensions, F32, F16 or BF16; of three, their last two of the first slice. Error naming `file` and
// the tensor for any other.
LoraView view_of(const std::string& file, const Tensor& tensor);
// All of a tensor as one row; it may be one of a GGUF file.
LoraView flat_view_of(const std::string& file, const Tensor& tensor);
// Rows [first, first + count) as f32 [count, columns]. Error naming `name` for a value that is not a finite number.
void read_rows(const LoraView& view, int64_t first, int64_t count, float* out, const std::string& name);

}  // namespace kt::inline weights
