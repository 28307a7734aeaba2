// Two 4-bit floats a byte, the even column in the low nibble. MXFP4: one power of two for 32 columns. NVFP4: an 8-bit
// float for 16 columns, times one f32 for all.
#include <cstring>

#include "base/checked.h"
#include "base/error.h"
#include "weights/dialects/dialects.h"

namespace kt::inline weights {

namespace {

// The codes of such rows; `name` as in "MXFP4".
void read_codes(const Module& module, const Slab& codes, std::string_view name, StoredPlanes& p) {
  if (module.transposed)
    fail_as(ErrorKind::kUnsupported, "{}: transposed fused {} experts are not read", codes.name(), name);
  const Dtype type = codes.dtype();
  if (type != Dtype::kU8 && type != Dtype::kI8 && type != Dtype::kF4)
    fail("{}: expected {} as U8, I8 or F4, found {}", codes.name(), name, describe(*codes.tensor));
  const auto& shape = codes.shape;
  if (shape.size() == 3 && shape[2] == 16) {  // blocks of 16 bytes
    p.k = checked_mul(shape[1], int64_t{32}, codes.name());
  } else if (shape.size() == 2) {
    p.k = type == Dtype::kF4 ? shape[1] : checked_mul(shape[1], int64_t{2}, codes.name());
  } else {
    fail("{}: expected rows of bytes or of 16-byte blocks, found {}", codes.name(), describe(*codes.tensor));
  }
  p.n = shape[0];
  if (p.k % 2 != 0) fail("{}: expected an even number of columns, found {}", codes.name(), p.k);
  p.packing = CodePacking::kRowNibbles;
  p.codes = codes.bytes;
  p.row_stride = p.k / 2;
}

}  // namespace

Reading read_nvfp4(const Module& module, const Slab& codes, const Slab& scales) {
  Reading out{.dialect = "nvfp4", .type = InputType::kInt4, .planes = {}};
  StoredPlanes& p = out.planes;
  // Their product with the tensor's factor is no 8-bit float.
  p.format = {.code = Code::kE2m1, .scale = Scale::kF32, .span = {.k = 16}};
  read_codes(module, codes, "NVFP4", p);
  expect_shape(scales, {p.n, ceil_div<int64_t>(p.k, 16)});
  p.scales = scales.bytes;
  p.scale_type = scales.dtype();
  p.scale_span_stride = 1;
  p.scale_row_stride = scales.shape[1];
  const Slab factor = module.find({"weight_scale_2"});
  if (!factor) fail("{}: expected a weight_scale_2 beside scales of type F8_E4M3", scales.name());
  if (factor.dtype() != Dtype::kF32 || elements(factor.shape) != 1)
    fail("{}: expected one F32 number for a matrix, found {}", factor.name(), describe(*factor.tensor));
  std::memcpy(&p.scale_factor, factor.bytes.data(), sizeof p.scale_factor);
  return out;
}

Reading read_mxfp4(const Module& module, const Slab& codes, const Slab& scales) {
  Reading out{.dialect = "mxfp4", .type = InputType::kInt4, .planes = {}};
  StoredPlanes& p = out.planes;
  p.format = {.code = Code::kE2m1, .scale = Scale::kE8m0, .span = {.k = 32}};
  read_codes(module, codes, "MXFP4", p);
  if (scales.dtype() != Dtype::kU8 && scales.dtype() != Dtype::kE8m0)
    fail("{}: expected exponents as U8 or F8_E8M0, found {}", scales.name(), describe(*scales.tensor));
  expect_shape(scales, {p.n, ceil_div<int64_t>(p.k, 32)});
  p.scales = scales.bytes;
  p.scale_type = scales.dtype();
  p.scale_span_stride = 1;
  p.scale_row_stride = scales.shape[1];
  return out;
}

}  // namespace kt::inline weights
