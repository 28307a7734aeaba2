// Integers packed several to a word: compressed-tensors along a row, GPTQ along a column, AWQ across rows.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "weights/dialects/compressed.h"
#include "weights/dialects/dialects.h"

namespace kt::inline weights {
namespace {

template <class T>
T load_at(const Slab& slab, int64_t index) {
  T value;
  std::memcpy(&value, slab.bytes.data() + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

void expect_int32(const Slab& slab, size_t dimensions) {
  if (slab.dtype() != Dtype::kI32 && slab.dtype() != Dtype::kU32)
    fail("{}: expected I32, found {}", slab.name(), describe(*slab.tensor));
  if (slab.shape.size() != dimensions)
    fail("{}: expected {} dimensions, found {}", slab.name(), dimensions, describe(*slab.tensor));
}

// Columns of one group, from their number and what the config says; 0 for one group a row.
int group_length(const Module& module, const Slab& scales, int64_t k, int64_t groups) {
  const int said = module.config->quantization.group_size;
  if (groups == 1) return 0;
  if (said > 0 && ceil_div<int64_t>(k, said) == groups) return said;
  if (groups < 1 || k % groups != 0 || k / groups > INT32_MAX || said > 0)
    fail("{}: expected {} groups along {} columns, found {}", scales.name(),
         said > 0 ? text("{} (group_size {})", ceil_div<int64_t>(k, said), said) : "a divisor's number of", k,
         groups);
  return static_cast<int>(k / groups);
}

// Bits of a code as the config says; 4 where it is silent.
int code_width(const Module& module, const Slab& codes) {
  const int bits = module.config->quantization.bits;
  if (bits != 0 && bits != 4 && bits != 8)
    fail_as(ErrorKind::kUnsupported, "{}: {}-bit weights are not read, only 4 and 8", codes.name(), bits);
  return bits == 0 ? 4 : bits;
}

// Stored group of every column. Formats know spans of consecutive columns: where the order of groups is that
// of the columns nothing changes; else spans become the longest stretch that never crosses from one group
// into another (1 for a true activation order), and each names its group. Exact, only larger.
void apply_group_index(const Slab& index, StoredPlanes& p, int64_t groups) {
  expect_int32(index, 1);
  expect_shape(index, {p.k});
  const int64_t length = p.format.span.k == 0 ? p.k : p.format.span.k;
  std::vector<bool> used(static_cast<size_t>(groups), false);
  bool in_order = true;
  int64_t stretch = 0;  // the greatest common divisor of the columns where another group begins
  for (int64_t column = 0; column < p.k; ++column) {
    const auto group = load_at<int32_t>(index, column);
    if (group < 0 || group >= groups)
      fail("{}: column {} is in group {}, expected 0 to {}", index.name(), column, group, groups - 1);
    used[group] = true;
    in_order = in_order && group == column / length;
    if (column > 0 && group != load_at<int32_t>(index, column - 1)) stretch = std::gcd(stretch, column);
  }
  if (in_order) return;
  const auto missing = std::ranges::find(used, false);
  if (missing != used.end())
    fail("{}: no column is in group {} of {}", index.name(), missing - used.begin(), groups);
  p.format.span.k = static_cast<int>(stretch);
  for (int64_t column = 0; column < p.k; column += stretch)
    p.groups.push_back(load_at<int32_t>(index, column));
}

bool all_words(const Slab& slab, uint32_t wanted) {
  const int64_t count = std::ssize(slab.bytes) / 4;
  for (int64_t i = 0; i < count; ++i)
    if (load_at<uint32_t>(slab, i) != wanted) return false;
  return true;
}

// A nibble or byte repeated over a word.
uint32_t repeated(uint32_t value, int bits) { return bits == 8 ? value * 0x01010101u : value * 0x11111111u; }

// Every zero is the middle code: a bias instead of zero points.
void make_symmetric(StoredPlanes& p) {
  p.format.min = Min::kNone;
  p.format.bias = p.bits == 8 ? 0 : 8;  // 8-bit codes are read as two's complement
  p.zero_packing = ZeroPacking::kNone;
}

struct QTensors {
  Slab weight, scales, zeros;
};

QTensors q_tensors(const Module& module) {
  QTensors t{module.find({"qweight"}), module.find({"scales"}), module.find({"qzeros"})};
  if (!t.scales || !t.zeros) fail("{}: has no {} beside it", t.weight.name(), t.scales ? "qzeros" : "scales");
  expect_int32(t.weight, 2);
  expect_int32(t.zeros, 2);
  if (t.scales.shape.size() != 2)
    fail("{}: expected [groups, rows], found {}", t.scales.name(), describe(*t.scales.tensor));
  return t;
}

void q_scales(const Module& module, const QTensors& t, StoredPlanes& p) {
  p.format.scale = scale_kind(t.scales);
  p.format.span.k = group_length(module, t.scales, p.k, t.scales.shape[0]);
  p.scales = t.scales.bytes;
  p.scale_type = t.scales.dtype();
  p.scale_row_stride = dtype_bits(p.scale_type) / 8;
  p.scale_span_stride = p.n * p.scale_row_stride;
  expect_shape(t.zeros, {t.scales.shape[0], p.n / (32 / p.bits)});
  p.zeros = t.zeros.bytes;
  p.zero_stride = t.zeros.shape[1] * 4;
}

Reading read_gptq(const Module& module, const QTensors& t) {
  Reading out{.dialect = "gptq", .type = InputType::kInt4, .planes = {}};
  StoredPlanes& p = out.planes;
  p.bits = code_width(module, t.weight);
  if (p.bits == 8) out.type = InputType::kAuto;
  const int64_t per_word = 32 / p.bits;
  p.format = {.code = p.bits == 8 ? Code::kI8 : Code::kU4, .min = Min::kZero, .span = {}};
  p.n = t.weight.shape[1];
  p.k = checked_mul(t.weight.shape[0], per_word, t.weight.name());
  if (p.n % per_word != 0)
    fail("{}: expected a multiple of {} columns, found {}", t.weight.name(), per_word,
         shape_text(t.weight.shape));
  p.packing = CodePacking::kColumnWords;
  p.codes = t.weight.bytes;
  p.row_stride = p.n * 4;
  p.zero_packing = ZeroPacking::kInOrder;
  p.zero_offset = module.config->quantization.checkpoint_format == "gptq_v2" ? 0 : 1;
  q_scales(module, t, p);
  if (const Slab index = module.find({"g_idx"})) expect_shape(index, {p.k});
  return out;
}

Reading read_awq(const Module& module, const QTensors& t) {
  Reading out{.dialect = "awq", .type = InputType::kInt4, .planes = {}};
  StoredPlanes& p = out.planes;
  if (code_width(module, t.weight) != 4)
    fail_as(ErrorKind::kUnsupported, "{}: 8-bit AWQ weights are not read", t.weight.name());
  p.format = {.code = Code::kU4, .min = Min::kZero, .span = {}};
  p.n = checked_mul(t.weight.shape[1], int64_t{8}, t.weight.name());
  p.k = t.weight.shape[0];
  p.packing = CodePacking::kRowWords;
  p.codes = t.weight.bytes;
  p.row_stride = t.weight.shape[1] * 4;
  p.zero_packing = ZeroPacking::kAwqOrder;
  q_scales(module, t, p);
  return out;
}

}  // namespace

Reading read_qweight(const Module& module) {
  const QTensors t = q_tensors(module);
  if (module.transposed || module.rows != RowChoice::kAll)
    fail_as(ErrorKind::kUnsupported, "{}: gate and up fused in one GPTQ or AWQ tensor are not read",
            t.weight.name());
  // The scales say how many rows there are, and so along which side words are packed.
  const int64_t n = t.scales.shape[1];
  const std::string& method = module.config->quantization.method;
  if (t.weight.shape[1] == n && method != "awq") return read_gptq(module, t);
  if (t.weight.shape[1] == n / 8 && n % 8 == 0 && method != "gptq") return read_awq(module, t);
  fail("{}: {} fits neither GPTQ nor AWQ with scales {}{}", t.weight.name(), shape_text(t.weight.shape),
       shape_text(t.scales.shape), method.empty() ? "" : text(" (config says {})", method));
}

void settle_qweight(const Module& module, Reading& reading) {
  const QTensors t = q_tensors(module);
  StoredPlanes& p = reading.planes;
  if (const Slab index = module.find({"g_idx"}); index && reading.dialect == "gptq")
    apply_group_index(index, p, t.scales.shape[0]);
  else if (module.config->quantization.desc_act && reading.dialect == "gptq")
    fail("{}: config says desc_act, but there is no g_idx beside it", t.weight.name());
  const uint32_t middle = p.bits == 8 ? 128 : 8;
  if (all_words(t.zeros, repeated(middle - p.zero_offset, p.bits))) return make_symmetric(p);
  // Some tools store the zero itself in symmetric checkpoints of the older kind.
  if (module.config->quantization.symmetric && all_words(t.zeros, repeated(middle, p.bits)))
    return make_symmetric(p);
  if (p.bits == 8)
    fail_as(ErrorKind::kUnsupported, "{}: zero points of 8-bit weights are not read", t.zeros.name());
}

Reading read_compressed(const Module& module) {
  const Slab codes = module.find({"weight_packed"}), scales = module.find({"weight_scale"});
  Reading out{.dialect = "compressed-tensors", .type = InputType::kInt4, .planes = {}};
  StoredPlanes& p = out.planes;
  if (!scales) fail("{}: has no weight_scale beside it", codes.name());
  if (module.transposed)
    fail_as(ErrorKind::kUnsupported, "{}: transposed fused packed experts are not read", codes.name());
  const bool bytes = codes.dtype() == Dtype::kU8 || codes.dtype() == Dtype::kI8;
  if (!bytes) expect_int32(codes, 2);
  if (codes.shape.size() != 2 || scales.shape.size() != 2)
    fail("{}: expected two dimensions with {}, found {}", codes.name(), shape_text(scales.shape),
         describe(*codes.tensor));
  p.bits = code_width(module, codes);
  if (p.bits == 8) out.type = InputType::kAuto;
  p.n = codes.shape[0];
  p.row_stride = checked_mul(codes.shape[1], int64_t{bytes ? 1 : 4}, codes.name());
  p.k = checked_mul(p.row_stride, int64_t{8 / p.bits}, codes.name());
  const Slab shape = module.find({"weight_shape"});
  if (shape && p.k != module.config->hidden && p.k != module.config->inter) settle_compressed(module, p);
  p.packing = p.bits == 8 ? CodePacking::kOffsetByte : CodePacking::kRowNibbles;
  p.column_stride = 1;
  p.codes = codes.bytes;
  p.format = {.code = p.bits == 8 ? Code::kI8 : Code::kU4,
              .bias = p.bits == 8 ? 0 : 8,
              .scale = scale_kind(scales),
              .span = {}};
  p.format.span.k = group_length(module, scales, p.k, scales.shape[1]);
  expect_shape(scales, {p.n, spans(p.format, p.k)});
  p.scales = scales.bytes;
  p.scale_type = scales.dtype();
  p.format = packed_read_format(p.format);
  p.scale_span_stride = dtype_bits(p.scale_type) / 8;
  p.scale_row_stride = scales.shape[1] * p.scale_span_stride;
  if (const Slab zeros = module.find({"weight_zero_point"})) {
    if (p.bits == 8 || (zeros.dtype() != Dtype::kI32 && zeros.dtype() != Dtype::kU32))
      fail_as(ErrorKind::kUnsupported, "{}: zero points of type {} with {}-bit weights are not read",
              zeros.name(), describe(*zeros.tensor), p.bits);
    expect_shape(zeros, {ceil_div<int64_t>(p.n, 8), scales.shape[1]});
    p.format.bias = 0;
    p.format.min = Min::kZero;
    p.zero_packing = ZeroPacking::kRowsDown;
    p.zeros = zeros.bytes;
    p.zero_stride = zeros.shape[1] * 4;
  }
  return out;
}

void settle_compressed(const Module& module, StoredPlanes& p) {
  if (const Slab shape = module.find({"weight_shape"})) {
    const bool wide = shape.dtype() == Dtype::kI64;
    if (!wide) expect_int32(shape, 1);
    expect_shape(shape, {2});
    const int64_t n = wide ? load_at<int64_t>(shape, 0) : load_at<int32_t>(shape, 0);
    const int64_t k = wide ? load_at<int64_t>(shape, 1) : load_at<int32_t>(shape, 1);
    const Slab codes = module.find({"weight_packed"});
    const int64_t unit = codes && dtype_bits(codes.dtype()) == 32 ? 32 : 8;
    if (n != p.n || k < 1 || k > INT64_MAX / 16 ||
        ceil_div<int64_t>(k * p.bits, unit) * (unit / 8) != p.row_stride)
      fail("{}: says [{}, {}], weight_packed holds [{}, {}]", shape.name(), n, k, p.n,
           p.row_stride * 8 / p.bits);
    p.k = k;
  }
  const Slab index = module.find({"weight_g_idx"});
  if (!index || p.format.scale == Scale::kNone) return;
  expect_int32(index, 1);
  expect_shape(index, {p.k});
  if (all_words(index, ~0u)) return;  // -1 everywhere: a place kept for an order that was never made
  apply_group_index(index, p, module.find({"weight_scale"}).shape[1]);
}

}  // namespace kt::inline weights
