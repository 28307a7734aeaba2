// MXFP4: two 4-bit floats a byte, the even column in the low nibble, one power of two for 32 columns.
#include "base/checked.h"
#include "base/error.h"
#include "weights/dialects/dialects.h"

namespace kt {

Reading read_mxfp4(const Module& module, const Slab& codes, const Slab& scales) {
  Reading out{.dialect = "mxfp4", .type = InputType::kInt4, .planes = {}};
  StoredPlanes& p = out.planes;
  p.format = {.code = Code::kE2m1, .scale = Scale::kE8m0, .span = {.k = 32}};
  if (module.transposed)
    fail_as(ErrorKind::kUnsupported, "{}: transposed fused MXFP4 experts are not read", codes.name());
  const Dtype type = codes.dtype();
  if (type != Dtype::kU8 && type != Dtype::kI8 && type != Dtype::kF4)
    fail("{}: expected MXFP4 as U8, I8 or F4, found {}", codes.name(), describe(*codes.tensor));
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
  if (scales.dtype() != Dtype::kU8 && scales.dtype() != Dtype::kE8m0)
    fail("{}: expected exponents as U8 or F8_E8M0, found {}", scales.name(), describe(*scales.tensor));
  expect_shape(scales, {p.n, ceil_div<int64_t>(p.k, 32)});
  p.scales = scales.bytes;
  p.scale_type = scales.dtype();
  p.scale_span_stride = 1;
  p.scale_row_stride = scales.shape[1];
  return out;
}

}  // namespace kt
