#include "hybrid/expert_codes.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "base/checked.h"
#include "base/error.h"
#include "formats/floats.h"
#include "hybrid/layer_source.h"
#include "weights/dialects/plane_matrix.h"

namespace kt::inline hybrid {
namespace {

// How a matrix of a method lies in memory.
struct CodeKind {
  std::string_view method;
  CodePacking packing;
  Scale scale = Scale::kNone;
};
constexpr CodeKind kCodeKinds[] = {
    {"BF16", CodePacking::kPlain},
    {"FP8", CodePacking::kPlain, Scale::kF32},
    {"FP8_PERCHANNEL", CodePacking::kPlain, Scale::kF32},
    {"RAWINT4", CodePacking::kRowNibbles, Scale::kBf16},
    {"GPTQ_INT4", CodePacking::kColumnWords, Scale::kF32},
    {"MXFP4", CodePacking::kRowNibbles, Scale::kBf16},
    {"MXFP8", CodePacking::kPlain, Scale::kE8m0},
    {"LLAMAFILE", CodePacking::kGguf},
};

const CodeKind& kind_of(const WeightMethod& method) {
  std::string known;
  for (const CodeKind& kind : kCodeKinds) {
    if (kind.method == method.name) return kind;
    known += text("{}{}", known.empty() ? "" : ", ", kind.method);
  }
  fail("weights of method {} are not read from codes; those of {} are", method.name, known);
}

Dtype dtype_of(Scale scale) {
  return scale == Scale::kBf16 ? Dtype::kBf16 : scale == Scale::kE8m0 ? Dtype::kE8m0 : Dtype::kF32;
}

// An expert's `size` bytes.
std::span<const std::byte> bytes_of(const std::vector<const void*>& addresses, int expert, int64_t size) {
  const bool one_for_all = addresses.size() == 1;
  const auto* const first =
      static_cast<const std::byte*>(addresses[one_for_all ? 0 : static_cast<size_t>(expert)]);
  return {first + (one_for_all ? expert * size : 0), static_cast<size_t>(size)};
}

// One projection of all experts.
struct CodeSide {
  const ExpertCodes::Side* given = nullptr;
  StoredPlanes planes;  // of any expert, without addresses
  int64_t code_size = 0, scale_size = 0;
  std::optional<Format> read_as = {};  // none: as it is stored
};

void check_columns(const CodeSide& side, std::string_view name) {
  const StoredPlanes& p = side.planes;
  const int unit = p.packing == CodePacking::kRowNibbles    ? 2
                   : p.packing == CodePacking::kColumnWords ? 8
                   : p.packing == CodePacking::kGguf        ? gguf_block_size(p.gguf_type)
                                                            : 1;
  if (p.k % unit != 0) fail("{}: {} columns, expected a multiple of {}", name, p.k, unit);
  const bool groups = p.format.span.k > 0 && p.format.span.n == 1 && p.packing != CodePacking::kGguf;
  if (groups && p.k % p.format.span.k != 0)
    fail("{}: {} columns are no whole number of groups of {}", name, p.k, p.format.span.k);
}

void check_addresses(const std::vector<const void*>& addresses, int experts, std::string_view what) {
  if (std::ssize(addresses) != experts && addresses.size() != 1)
    fail("{}: {} addresses for {} experts, expected one for each or one for all", what, addresses.size(),
         experts);
  const auto null = std::ranges::find(addresses, nullptr);
  if (null != addresses.end()) fail("{}: a null address for expert {}", what, null - addresses.begin());
}

CodeSide gguf_side(const ExpertCodes::Side& given, int64_t n, int64_t k, std::string_view name) {
  const auto type = gguf_type(given.gguf_type);
  if (!type)
    fail_as(ErrorKind::kUnsupported, "{}: weights of GGUF type {} are not read", name, given.gguf_type);
  CodeSide side{.given = &given, .planes = {}};
  StoredPlanes& p = side.planes;
  p.format = gguf_format(*type);
  p.n = n;
  p.k = k;
  p.gguf_type = *type;
  p.packing = p.format.scale == Scale::kNone ? CodePacking::kPlain : CodePacking::kGguf;
  p.row_stride = k / gguf_block_size(*type) * gguf_block_bytes(*type);
  p.column_stride = code_bytes(p.format.code);
  side.code_size = n * p.row_stride;
  return side;
}

CodeSide side_of(const ExpertCodes::Side& given, const CodeKind& kind, Format format, int64_t n, int64_t k) {
  format.scale = kind.scale;
  CodeSide side{.given = &given, .planes = {}};
  StoredPlanes& p = side.planes;
  p.format = format;
  p.n = n;
  p.k = k;
  p.packing = kind.packing;
  const bool by_column = kind.packing == CodePacking::kColumnWords;
  const int64_t row_bytes = k * code_bits(format.code) / 8;
  p.row_stride = by_column ? n * 4 : row_bytes;
  p.column_stride = code_bytes(format.code);
  side.code_size = n * row_bytes;
  const int64_t size = scale_bytes(format.scale), groups = spans(format, k);
  p.scale_type = dtype_of(format.scale);
  p.scale_row_stride = by_column ? size : groups * size;
  p.scale_span_stride = by_column ? n * size : size;
  side.scale_size = ceil_div<int64_t>(n, format.span.n) * groups * size;
  return side;
}

// MXFP4 as engines hand it on: exponents have become bf16, and some tools have scales that are no powers of
// two. The format that holds these values: MXFP4's own, or 8-bit integers, twice an E2M1 code's number, with
// f32 scales.
Format format_for_bf16_scales(const CodeSide& side, int experts) {
  for (int expert = 0; expert < experts; ++expert) {
    const std::span scales = bytes_of(side.given->scales, expert, side.scale_size);
    for (size_t i = 0; i < scales.size(); i += 2) {
      uint16_t bits;
      std::memcpy(&bits, scales.data() + i, sizeof bits);
      if ((bits & 0x807F) != 0 || bits == 0)
        return {.code = Code::kI8, .scale = Scale::kF32, .span = {.k = side.planes.format.span.k}};
    }
  }
  return format_named("mxfp4");
}

// Twice an E2M1 code's number.
constexpr std::array<int8_t, 16> kE2m1Twice = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Such a matrix in one of these formats.
class Bf16ScaledMatrix final : public StoredMatrix {
 public:
  Bf16ScaledMatrix(std::unique_ptr<StoredMatrix> stored, const Format& to) : stored_(std::move(stored)) {
    name = stored_->name;
    format = to;
    n = stored_->n;
    k = stored_->k;
  }

  Matrix rows(int64_t first, int64_t count) const override {
    const Matrix from = stored_->rows(first, count);
    Matrix out(format, count, k);
    const bool exponents = format.scale == Scale::kE8m0;
    for (size_t i = 0; i < out.codes.size(); ++i)
      out.codes[i] = exponents ? from.codes[i] : static_cast<uint8_t>(kE2m1Twice[from.codes[i]]);
    for (size_t i = 0; i < from.scales.size() / 2; ++i) {
      bf16 scale;
      std::memcpy(&scale, from.scales.data() + i * 2, sizeof scale);
      if (exponents) {
        out.scales[i] = static_cast<uint8_t>(scale.bits >> 7);
      } else {
        const float half = to_f32(scale) * 0.5f;
        std::memcpy(out.scales.data() + i * sizeof half, &half, sizeof half);
      }
    }
    return out;
  }

 private:
  std::unique_ptr<StoredMatrix> stored_;
};

class CodeSource final : public LayerSource {
 public:
  CodeSource(const ExpertCodes& codes, const ExpertLayerOptions& o, const WeightMethod& method)
      : LayerSource(o.shape, o.layer), method_(method.name) {
    const CodeKind& kind = kind_of(method);
    const bool gguf = kind.packing == CodePacking::kGguf;
    const Format format =
        gguf ? Format{} : formats_of(method, hidden(), inter(), o.group_size, o.zero_point).gate_up;
    if (format.min != Min::kNone)
      fail_as(ErrorKind::kUnsupported, "layer {}: method {}: zero points are not read from codes", o.layer,
              method.name);
    const std::array<const ExpertCodes::Side*, 3> given = {&codes.gate, &codes.up, &codes.down};
    for (const Projection projection : kProjections) {
      const auto i = static_cast<size_t>(projection);
      const std::string name = text("layer {} {}", o.layer, name_of(projection));
      const auto [n, k] = shape_of(projection);
      sides_[i] = gguf ? gguf_side(*given[i], n, k, name) : side_of(*given[i], kind, format, n, k);
      check_columns(sides_[i], name);
      check_addresses(given[i]->codes, experts(), name);
      if (sides_[i].scale_size) check_addresses(given[i]->scales, experts(), name + " scales");
      if (method.name == "MXFP4") sides_[i].read_as = format_for_bf16_scales(sides_[i], experts());
    }
  }

  std::string_view dialect() const override { return method_; }

  std::unique_ptr<StoredMatrix> at(int layer, int expert, Projection projection) const override {
    const CodeSide& side = sides_[static_cast<size_t>(projection)];
    StoredPlanes planes = side.planes;
    planes.codes = bytes_of(side.given->codes, expert, side.code_size);
    if (side.scale_size) planes.scales = bytes_of(side.given->scales, expert, side.scale_size);
    auto matrix = plane_matrix(module_name(layer, expert, projection), std::move(planes));
    if (!side.read_as) return matrix;
    return std::make_unique<Bf16ScaledMatrix>(std::move(matrix), *side.read_as);
  }

 private:
  std::string_view method_;
  std::array<CodeSide, 3> sides_;
};

}  // namespace

std::unique_ptr<ExpertSource> source_of_codes(const ExpertCodes& codes, const ExpertLayerOptions& options,
                                              const WeightMethod& method) {
  return std::make_unique<CodeSource>(codes, options, method);
}

}  // namespace kt::inline hybrid
