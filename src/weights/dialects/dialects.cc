#include "weights/dialects/dialects.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "text/shown.h"

namespace kt::inline weights {
namespace {

// Suffixes that some dialect reads, and those that say nothing about the weights.
constexpr std::string_view kKnownSuffixes[] = {
    "",
    "weight",
    "weight_scale_inv",
    "weight_scale",
    "weight_scale_2",
    "scale_inv",
    "scale",
    "weight_packed",
    "scales",
    "blocks",
    "weight_shape",
    "qweight",
    "qzeros",
    "g_idx",
    "weight_g_idx",
    "bias",
    "weight_zero_point",
    "input_scale",
    "activation_scale",
    "input_zero_point",
};

void check_suffixes(const Module& module) {
  for (const ExpertTensor& entry : module.tensors) {
    if (std::ranges::find(kKnownSuffixes, entry.suffix) == std::end(kKnownSuffixes))
      fail_as(ErrorKind::kUnsupported, "{}: experts with '{}' tensors are not read ({})",
              shown(entry.tensor->name), shown(entry.suffix), describe(*entry.tensor));
  }
}

// Only read_compressed knows what to do with an order of columns: anywhere else it would be lost.
void refuse_order(const Module& module) {
  if (const Slab order = module.find({"weight_g_idx"}))
    fail_as(ErrorKind::kUnsupported, "{}: an order of columns is read with packed integers only",
            order.name());
}

bool is_exponent(Dtype dtype) { return dtype == Dtype::kU8 || dtype == Dtype::kE8m0; }

Reading read_stored(const Module& module) {
  check_suffixes(module);
  if (module.find({"qweight"})) {
    refuse_order(module);
    return read_qweight(module);
  }
  const Slab packed = module.find({"weight_packed"});
  const Slab scale = module.find({"weight_scale", "scale", "weight_scale_inv", "scale_inv"});
  const bool exponents = packed && scale && is_exponent(scale.dtype());
  if (packed && !exponents) return read_compressed(module);
  refuse_order(module);
  if (exponents) return read_mxfp4(module, packed, scale);
  if (const Slab blocks = module.find({"blocks"})) {
    const Slab exponents = module.find({"scales"});
    if (!exponents) fail("{}: has no tensor of scales", blocks.name());
    return read_mxfp4(module, blocks, exponents);
  }
  const Slab weight = module.find({"weight", ""});
  if (!weight) fail("{}: has no weight, only {}", module.name, shown(module.tensors.front().tensor->name));
  if (weight.dtype() == Dtype::kGguf) return read_gguf(module, weight);
  const bool byte = weight.dtype() == Dtype::kI8 || weight.dtype() == Dtype::kU8;
  if (weight.dtype() == Dtype::kF4 || (byte && scale && is_exponent(scale.dtype()))) {
    if (!scale) fail("{}: has no tensor of scales", weight.name());
    return read_mxfp4(module, weight, scale);
  }
  if (byte && scale && scale.dtype() == Dtype::kE4m3) return read_nvfp4(module, weight, scale);
  return read_float(module, weight);
}

// The projection's rows of what is stored.
void choose_rows(const Module& module, StoredPlanes& planes) {
  if (module.rows == RowChoice::kAll) return;
  if (planes.n % 2 != 0)
    fail("{}: expected gate and up in as many rows each, found {} rows", module.name, planes.n);
  const int64_t half = planes.n / 2;
  switch (module.rows) {
    case RowChoice::kAll:
      break;
    case RowChoice::kFirstHalf:
      return planes.select_rows(0, 1, half, module.name);
    case RowChoice::kSecondHalf:
      return planes.select_rows(half, 1, half, module.name);
    case RowChoice::kEven:
      return planes.select_rows(0, 2, half, module.name);
    case RowChoice::kOdd:
      return planes.select_rows(1, 2, half, module.name);
  }
}

}  // namespace

Slab Module::find(std::initializer_list<std::string_view> suffixes) const {
  for (const std::string_view suffix : suffixes) {
    for (const ExpertTensor& entry : tensors) {
      if (entry.suffix != suffix) continue;
      const Tensor& tensor = *entry.tensor;
      if (expert < 0) return {&tensor, tensor.shape, tensor.bytes};
      if (tensor.shape.empty() || tensor.shape[0] <= expert)
        fail("{}: expected a slice for expert {}, found {}", tensor.name, expert, describe(tensor));
      const size_t bytes = tensor.bytes.size() / static_cast<size_t>(tensor.shape[0]);
      return {&tensor, std::span(tensor.shape).subspan(1), tensor.bytes.subspan(expert * bytes, bytes)};
    }
  }
  return {};
}

Reading read_module(const Module& module) {
  Reading reading = read_stored(module);
  choose_rows(module, reading.planes);
  return reading;
}

Reading read_module_bytes(const Module& module) {
  Reading reading = read_stored(module);
  if (module.find({"qweight"})) settle_qweight(module, reading);
  if (reading.planes.zero_packing == ZeroPacking::kRowsDown || module.find({"weight_shape", "weight_g_idx"}))
    settle_compressed(module, reading.planes);
  choose_rows(module, reading.planes);
  return reading;
}

std::optional<std::vector<float>> read_bias(const Module& module) {
  const Slab bias = module.find({"bias"});
  if (!bias) return std::nullopt;
  if (bias.shape.size() != 1)
    fail("{}: expected one value a row, found {}", bias.name(), describe(*bias.tensor));
  StoredPlanes planes;
  planes.n = bias.shape[0];
  planes.k = 1;
  planes.codes = bias.bytes;
  const Dtype dtype = bias.dtype();
  const auto gguf = dtype == Dtype::kGguf ? gguf_type(bias.tensor->gguf_type) : std::nullopt;
  if (dtype == Dtype::kF32 || gguf == GgufType::kF32) {
    planes.format.code = Code::kF32;
  } else if (dtype == Dtype::kBf16 || gguf == GgufType::kBF16) {
    planes.format.code = Code::kBf16;
  } else if (dtype == Dtype::kF16 || gguf == GgufType::kF16) {
    planes.format.code = Code::kF16;
  } else {
    fail("{}: expected BF16, F16 or F32, found {}", bias.name(), describe(*bias.tensor));
  }
  planes.row_stride = planes.column_stride = code_bytes(planes.format.code);
  Module rows = module;
  rows.name = bias.name();
  choose_rows(rows, planes);
  std::vector<float> values(static_cast<size_t>(planes.n));
  plane_matrix(bias.name(), planes)->values(0, planes.n, values.data());
  return values;
}

Scale scale_kind(const Slab& scales) {
  switch (scales.dtype()) {
    case Dtype::kF32:
      return Scale::kF32;
    case Dtype::kBf16:
      return Scale::kBf16;
    case Dtype::kF16:
      return Scale::kF16;
    default:
      fail("{}: expected scales of type F32, BF16 or F16, found {}", scales.name(), describe(*scales.tensor));
  }
}

void expect_shape(const Slab& slab, std::initializer_list<int64_t> shape) {
  if (std::ranges::equal(slab.shape, shape)) return;
  fail("{}: expected {}, found {}", slab.name(), shape_text(std::span(shape.begin(), shape.size())),
       shape_text(slab.shape));
}

}  // namespace kt::inline weights
