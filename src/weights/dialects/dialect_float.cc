// Weights whose codes lie in plain order: BF16, F16, F32, E4M3 with its kinds of scales, and int8 per
// channel.
#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "base/error.h"
#include "weights/dialects/dialects.h"

namespace kt::inline weights {
namespace {

Reading plain(const Module& module, const Slab& weight, std::string_view dialect, InputType type,
              Format format) {
  Reading out{.dialect = dialect, .type = type, .planes = {}};
  StoredPlanes& p = out.planes;
  p.format = format;
  p.n = weight.shape[0];
  p.k = weight.shape[1];
  p.codes = weight.bytes;
  p.column_stride = code_bytes(format.code);
  p.row_stride = p.k * p.column_stride;
  if (module.transposed) {
    std::swap(p.n, p.k);
    std::swap(p.row_stride, p.column_stride);
  }
  return out;
}

// One scale per row, or one for all rows (stride 0). Beside a transposed weight the rows may lie along either
// side.
bool per_channel(const Module& module, const Slab& scales, StoredPlanes& p) {
  const auto& shape = scales.shape;
  const bool one = elements(shape) == 1;
  const bool vector =
      shape.size() == 1 || (shape.size() == 2 && (shape[1] == 1 || (module.transposed && shape[0] == 1)));
  const bool rows = vector && elements(shape) == p.n;
  if (!one && !rows) return false;
  p.format.span = {};
  p.scale_span_stride = 0;
  p.scale_row_stride = rows ? dtype_bits(scales.dtype()) / 8 : 0;
  return true;
}

// The sides of the grid are in the order of the weight's.
void scale_grid(const Module& module, const Slab& scales, StoredPlanes& p) {
  p.scale_span_stride = dtype_bits(scales.dtype()) / 8;
  p.scale_row_stride = scales.shape[1] * p.scale_span_stride;
  if (module.transposed) std::swap(p.scale_row_stride, p.scale_span_stride);
}

Reading read_fp8(const Module& module, const Slab& weight) {
  const Slab scales = module.find({"weight_scale_inv", "weight_scale", "scale_inv", "scale"});
  if (!scales) fail("{}: F8_E4M3 without a weight_scale_inv or weight_scale beside it", weight.name());
  Reading out =
      plain(module, weight, "fp8", InputType::kFp8, {.code = Code::kE4m3, .scale = Scale::kF32, .span = {}});
  StoredPlanes& p = out.planes;
  p.scales = scales.bytes;
  p.scale_type = scales.dtype();
  const bool exponents = p.scale_type == Dtype::kU8 || p.scale_type == Dtype::kE8m0;
  const bool grid = scales.shape.size() == 2;
  if (exponents && grid && scales.shape[0] == weight.shape[0] &&
      scales.shape[1] == ceil_div<int64_t>(weight.shape[1], 32)) {
    if (module.transposed)  // 32 numbers of different rows
      fail_as(ErrorKind::kUnsupported,
              "{}: exponents for 32 columns of transposed fused experts are not read", scales.name());
    out.dialect = "mxfp8";
    p.format.scale = Scale::kE8m0;
    p.format.span.k = 32;
    scale_grid(module, scales, p);
    return out;
  }
  if (p.scale_type != Dtype::kE8m0) scale_kind(scales);
  const QuantizationConfig& quantization = module.config->quantization;
  const int block_n = quantization.block_n > 0 ? quantization.block_n : 128;
  const int block_k = quantization.block_k > 0 ? quantization.block_k : 128;
  const bool told = !module.transposed || block_n == block_k;  // which side each number of the block is for
  int64_t blocks[] = {ceil_div<int64_t>(p.n, block_n), ceil_div<int64_t>(p.k, block_k)};
  if (module.transposed) std::swap(blocks[0], blocks[1]);
  if (told && std::ranges::equal(scales.shape, blocks)) {
    p.format.span = {.k = block_k, .n = block_n};
    scale_grid(module, scales, p);
    return out;
  }
  if (per_channel(module, scales, p)) {
    out.dialect = "fp8-channel";
    return out;
  }
  if (!told)
    fail_as(ErrorKind::kUnsupported, "{}: blocks of {} x {} of transposed fused experts are not read",
            scales.name(), block_n, block_k);
  fail("{}: expected {} for blocks of {} x {} or [{}] for channels of {}, found {}", scales.name(),
       shape_text(blocks), block_n, block_k, p.n, describe(*weight.tensor), shape_text(scales.shape));
}

Reading read_int8(const Module& module, const Slab& weight) {
  const Slab scales = module.find({"weight_scale", "scale"});
  if (!scales) fail("{}: {} without a weight_scale beside it", weight.name(), describe(*weight.tensor));
  if (const Slab zeros = module.find({"weight_zero_point"}))
    fail_as(ErrorKind::kUnsupported, "{}: zero points of 8-bit weights are not read", zeros.name());
  Reading out = plain(module, weight, "int8-channel", InputType::kAuto,
                      {.code = Code::kI8, .scale = scale_kind(scales), .span = {}});
  out.planes.scales = scales.bytes;
  out.planes.scale_type = scales.dtype();
  if (module.transposed || !per_channel(module, scales, out.planes))
    fail("{}: expected [{}] for {}, found {}", scales.name(), out.planes.n, describe(*weight.tensor),
         shape_text(scales.shape));
  return out;
}

}  // namespace

Reading read_float(const Module& module, const Slab& weight) {
  if (weight.shape.size() != 2)
    fail("{}: expected {} dimensions, found {}", weight.name(), module.expert < 0 ? 2 : 3,
         describe(*weight.tensor));
  switch (weight.dtype()) {
    case Dtype::kBf16:
      return plain(module, weight, "bf16", InputType::kBf16, {.code = Code::kBf16, .span = {}});
    case Dtype::kF16:
      return plain(module, weight, "fp16", InputType::kFp16, {.code = Code::kF16, .span = {}});
    case Dtype::kF32:
      return plain(module, weight, "f32", InputType::kF32, {.code = Code::kF32, .span = {}});
    case Dtype::kE4m3:
      return read_fp8(module, weight);
    case Dtype::kI8:
      return read_int8(module, weight);
    default:
      fail_as(ErrorKind::kUnsupported, "{}: expert weights of type {} are not read", weight.name(),
              describe(*weight.tensor));
  }
}

}  // namespace kt::inline weights
