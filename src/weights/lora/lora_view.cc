#include "weights/lora/lora_view.h"

#include <cmath>
#include <optional>

#include "base/error.h"
#include "formats/floats.h"
#include "formats/gguf_blocks.h"
#include "text/shown.h"

namespace kt::inline weights {

namespace {

// Of the types that factors are read in; nothing for another one.
std::optional<Dtype> float_type(const Tensor& tensor) {
  if (tensor.dtype == Dtype::kF32 || tensor.dtype == Dtype::kBf16 || tensor.dtype == Dtype::kF16)
    return tensor.dtype;
  if (tensor.dtype != Dtype::kGguf) return {};
  const auto type = gguf_type(tensor.gguf_type);
  if (type == GgufType::kF32) return Dtype::kF32;
  if (type == GgufType::kF16) return Dtype::kF16;
  if (type == GgufType::kBF16) return Dtype::kBf16;
  return {};
}

[[noreturn]] void bad_factor(const std::string& file, const Tensor& tensor, const char* expected) {
  fail("{}: {}: expected {}, found {}", file, shown(tensor.name), expected, describe(tensor));
}

}  // namespace

LoraView flat_view_of(const std::string& file, const Tensor& tensor) {
  const std::optional<Dtype> type = float_type(tensor);
  if (!type) bad_factor(file, tensor, "F32, BF16 or F16");
  if (tensor.bytes.empty()) bad_factor(file, tensor, "at least one value");
  const int64_t values = elements(tensor.shape);
  return {.data = tensor.bytes.data(),
          .rows = 1,
          .columns = values,
          .row_stride = values,
          .size = static_cast<size_t>(dtype_bits(*type) / 8),
          .dtype = *type};
}

LoraView view_of(const std::string& file, const Tensor& tensor) {
  if (tensor.shape.size() != 2 && tensor.shape.size() != 3)
    bad_factor(file, tensor, "two or three dimensions");
  LoraView out = flat_view_of(file, tensor);
  out.columns = out.row_stride = tensor.shape.back();
  out.rows = tensor.shape[tensor.shape.size() - 2];
  return out;
}

void read_rows(const LoraView& view, int64_t first, int64_t count, float* out, const std::string& name) {
  const auto value = [&](const std::byte* at) {
    if (view.dtype == Dtype::kF32) {
      float whole = 0;
      std::memcpy(&whole, at, 4);
      return whole;
    }
    uint16_t bits = 0;
    std::memcpy(&bits, at, 2);
    return view.dtype == Dtype::kBf16 ? to_f32(bf16{bits}) : to_f32(f16{bits});
  };
  for (int64_t row = first; row < first + count; ++row)
    for (int64_t column = 0; column < view.columns; ++column, ++out) {
      *out = value(view.at(row, column));
      if (!std::isfinite(*out)) fail("{}: a value is not a finite number", name);
    }
}

}  // namespace kt::inline weights
