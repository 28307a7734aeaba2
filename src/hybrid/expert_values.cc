#include "hybrid/expert_values.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "formats/floats.h"
#include "hybrid/layer_source.h"

namespace kt::inline hybrid {
namespace {

int64_t size_of(Real type) { return type == Real::kF32 ? 4 : 2; }

void widen(const std::byte* from, Real type, int64_t count, float* out) {
  if (type == Real::kF32) {
    std::memcpy(out, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, from + i * 2, sizeof bits);
    out[i] = type == Real::kBf16 ? to_f32(bf16{bits}) : to_f32(f16{bits});
  }
}

// One expert's projection.
class ValueMatrix final : public StoredMatrix {
 public:
  ValueMatrix(std::string matrix_name, const Format& to, int64_t rows, int64_t columns, const std::byte* from,
              Real type)
      : from_(from), type_(type) {
    name = std::move(matrix_name);
    format = to;
    n = rows;
    k = columns;
  }

  Matrix rows(int64_t first, int64_t count) const override {
    std::vector<float> wide(static_cast<size_t>(count * k));
    values(first, count, wide.data());
    if (format.code == Code::kBf16 && type_ == Real::kBf16) {
      Matrix out(format, count, k);
      std::memcpy(out.codes.data(), from_ + first * k * 2, out.codes.size());
      return out;
    }
    try {
      return quantise(format, wide, count, k);
    } catch (const Error& error) {
      fail_as(error.kind(), "{}, rows from {}: {}", name, first, error.what());
    }
  }

  void values(int64_t first, int64_t count, float* out) const override {
    widen(from_ + first * k * size_of(type_), type_, count * k, out);
    for (int64_t i = 0; i < count * k; ++i)
      if (!is_finite(out[i]))
        fail("{}: row {}, column {} is not a finite number", name, first + i / k, i % k);
  }

 private:
  const std::byte* from_;
  Real type_;
};

class ValueSource final : public LayerSource {
 public:
  ValueSource(const ExpertValues& values, const ExpertsShape& shape, const MethodFormats& formats, int layer)
      : LayerSource(shape, layer), values_(values), formats_(formats) {
    if (!values.gate || !values.up || !values.down) fail("layer {}: gate, up or down is missing", layer);
  }
  std::string_view dialect() const override {
    return values_.type == Real::kF32 ? "f32" : values_.type == Real::kF16 ? "fp16" : "bf16";
  }
  std::unique_ptr<StoredMatrix> at(int layer, int expert, Projection projection) const override {
    const bool down = projection == Projection::kDown;
    const void* all = down ? values_.down : projection == Projection::kUp ? values_.up : values_.gate;
    const auto [n, k] = shape_of(projection);
    return std::make_unique<ValueMatrix>(
        module_name(layer, expert, projection), down ? formats_.down : formats_.gate_up, n, k,
        static_cast<const std::byte*>(all) + expert * n * k * size_of(values_.type), values_.type);
  }

 private:
  ExpertValues values_;
  MethodFormats formats_;
};

}  // namespace

std::unique_ptr<ExpertSource> source_of_values(const ExpertValues& values, const ExpertsShape& shape,
                                               const MethodFormats& formats, int layer) {
  return std::make_unique<ValueSource>(values, shape, formats, layer);
}

std::unique_ptr<StoredMatrix> matrix_of_values(std::string name, const Format& format, int64_t n, int64_t k,
                                               const void* values, Real type) {
  return std::make_unique<ValueMatrix>(std::move(name), format, n, k, static_cast<const std::byte*>(values),
                                       type);
}

}  // namespace kt::inline hybrid
