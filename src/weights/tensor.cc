#include "weights/tensor.h"

#include "base/error.h"
#include "weights/gguf/gguf.h"

namespace kt::inline weights {
namespace {

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  int bits;
};
constexpr DtypeRow kDtypes[] = {
    {Dtype::kBool, "BOOL", 8},    {Dtype::kU8, "U8", 8},        {Dtype::kI8, "I8", 8},
    {Dtype::kU16, "U16", 16},     {Dtype::kI16, "I16", 16},     {Dtype::kU32, "U32", 32},
    {Dtype::kI32, "I32", 32},     {Dtype::kU64, "U64", 64},     {Dtype::kI64, "I64", 64},
    {Dtype::kF16, "F16", 16},     {Dtype::kBf16, "BF16", 16},   {Dtype::kF32, "F32", 32},
    {Dtype::kF64, "F64", 64},     {Dtype::kE4m3, "F8_E4M3", 8}, {Dtype::kE5m2, "F8_E5M2", 8},
    {Dtype::kE8m0, "F8_E8M0", 8}, {Dtype::kF4, "F4", 4},        {Dtype::kGguf, "GGUF", 0},
};

}  // namespace

std::optional<Dtype> dtype_named(std::string_view name) {
  for (const DtypeRow& row : kDtypes)
    if (row.name == name && row.dtype != Dtype::kGguf) return row.dtype;
  return std::nullopt;
}

std::string_view name_of(Dtype dtype) { return kDtypes[static_cast<size_t>(dtype)].name; }
int dtype_bits(Dtype dtype) { return kDtypes[static_cast<size_t>(dtype)].bits; }

int64_t elements(std::span<const int64_t> shape) {
  int64_t product = 1;
  for (const int64_t size : shape) {
    if (size < 0) fail("shape {}: negative dimension", shape_text(shape));
    if (__builtin_mul_overflow(product, size, &product))
      fail("shape {} overflows 63 bits", shape_text(shape));
  }
  return product;
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += text_of(i == 0 ? "{}" : ", {}", shape[i]);
  return out + "]";
}

std::string describe(const Tensor& tensor) {
  const std::string type =
      tensor.dtype == Dtype::kGguf ? gguf_type_text(tensor.gguf_type) : std::string(name_of(tensor.dtype));
  return type + " " + shape_text(tensor.shape);
}

}  // namespace kt::inline weights
