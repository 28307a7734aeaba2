#include "weights/requantise.h"

#include <cstring>

#include "base/error.h"

namespace kt::inline weights {
namespace {

class RoundedMatrix : public StoredMatrix {
 public:
  RoundedMatrix(std::unique_ptr<StoredMatrix> from, const Format& to) : from_(std::move(from)) {
    name = from_->name;
    format = to;
    n = from_->n;
    k = from_->k;
    check_shape(format, n, k, name);
  }
  Matrix rows(int64_t first, int64_t count) const override {
    std::vector<float> values(static_cast<size_t>(count * k));
    from_->values(first, count, values.data());
    return rounded(values, first, count);
  }
  int64_t rows_at_once() const override { return from_->rows_at_once(); }
  void read_ahead() const override { from_->read_ahead(); }
  uint64_t held_bytes() const override { return from_->held_bytes(); }

 private:
  virtual Matrix rounded(std::span<const float> values, int64_t, int64_t count) const {
    return quantise(format, values, count, k);
  }

  std::unique_ptr<StoredMatrix> from_;
};

class PackedMatrix : public RoundedMatrix {
 public:
  PackedMatrix(std::unique_ptr<StoredMatrix> from, const PackedSpec& spec)
      : RoundedMatrix(std::move(from), packed_read_format(packed_format(spec))), spec_(spec) {}

 private:
  Matrix rounded(std::span<const float> values, int64_t first, int64_t count) const override {
    Matrix out = round_packed(spec_, count, k, values.data(), name, first);
    if (out.format == format) return out;
    std::vector<float> scales;
    const int64_t across = spans(format, k), length = format.span.k ? format.span.k : k;
    for (int64_t row = 0; row < count; ++row)
      for (int64_t s = 0; s < across; ++s) scales.push_back(scale_at(out.view(), row, s * length));
    out.format = format;
    const auto bytes = std::as_bytes(std::span(scales));
    out.scales.resize(bytes.size());
    std::memcpy(out.scales.data(), bytes.data(), bytes.size());
    return out;
  }

  PackedSpec spec_;
};

// Which matrix it is.
struct ExpertMatrix {
  int layer = 0;
  Projection projection = Projection::kGate;
  std::string module;
};
using ExpertRounding =
    std::function<std::unique_ptr<StoredMatrix>(std::unique_ptr<StoredMatrix>, const ExpertMatrix&)>;

class RoundedExperts : public ExpertSource {
 public:
  RoundedExperts(const ExpertSource& source, ExpertRounding rounding, std::string_view dialect)
      : source_(source), rounding_(std::move(rounding)), dialect_(dialect) {}
  std::string_view dialect() const override { return dialect_; }
  std::vector<int> layers() const override { return source_.layers(); }
  int experts() const override { return source_.experts(); }
  int64_t hidden() const override { return source_.hidden(); }
  int64_t inter() const override { return source_.inter(); }
  std::unique_ptr<StoredMatrix> at(int layer, int expert, Projection projection) const override {
    return rounding_(source_.at(layer, expert, projection),
                     {layer, projection, source_.module_name(layer, expert, projection)});
  }
  std::optional<std::vector<float>> bias(int layer, int expert, Projection projection) const override {
    return source_.bias(layer, expert, projection);
  }
  bool owns(std::string_view tensor) const override { return source_.owns(tensor); }
  std::string module_name(int layer, int expert, Projection projection) const override {
    return source_.module_name(layer, expert, projection);
  }

 private:
  const ExpertSource& source_;
  ExpertRounding rounding_;
  std::string dialect_;
};

}  // namespace

std::unique_ptr<ExpertSource> requantised(const ExpertSource& source, const Format& format) {
  const auto rounding = [format](std::unique_ptr<StoredMatrix> matrix, std::string_view) {
    return matrix->format == format ? std::move(matrix) : requantised(std::move(matrix), format);
  };
  return requantised(source, rounding, name_of(format));
}

std::unique_ptr<ExpertSource> requantised(const ExpertSource& source, MatrixRounding rounding,
                                          const std::string& dialect) {
  return std::make_unique<RoundedExperts>(
      source,
      [rounding = std::move(rounding)](auto matrix, const ExpertMatrix& which) {
        return rounding(std::move(matrix), which.module);
      },
      dialect);
}

std::unique_ptr<ExpertSource> requantised(const ExpertSource& source, const RoundedFormats& formats) {
  const auto rounding = [formats](std::unique_ptr<StoredMatrix> matrix, const ExpertMatrix& which) {
    const auto& format = which.projection == Projection::kDown ? formats.down : formats.gate_up;
    if (!format || *format == matrix->format) return matrix;
    if (formats.through_bf16 && matrix->format.code != Code::kBf16)
      matrix = requantised(std::move(matrix), format_named("bf16"));
    return requantised(std::move(matrix), *format);
  };
  return std::make_unique<RoundedExperts>(source, rounding, source.dialect());
}

std::unique_ptr<ExpertSource> requantised(const ExpertSource& source, ExpertFormats formats,
                                          const std::string& dialect) {
  const auto rounding = [formats = std::move(formats)](std::unique_ptr<StoredMatrix> matrix,
                                                       const ExpertMatrix& which) {
    const auto layer = static_cast<size_t>(which.layer);
    if (layer >= formats.size()) return matrix;
    const auto& format = formats[layer][static_cast<size_t>(which.projection)];
    return !format || *format == matrix->format ? std::move(matrix) : requantised(std::move(matrix), *format);
  };
  return std::make_unique<RoundedExperts>(source, rounding, dialect);
}

std::unique_ptr<StoredMatrix> requantised(std::unique_ptr<StoredMatrix> matrix, const Format& format) {
  return std::make_unique<RoundedMatrix>(std::move(matrix), format);
}

std::unique_ptr<StoredMatrix> requantised(std::unique_ptr<StoredMatrix> matrix, const PackedSpec& spec) {
  check_packed(spec, matrix->n, matrix->k, matrix->name);
  PackedSpec settled = spec;
  if (spec.group == matrix->k) settled.group = 0;  // a group as long as the row is the row, as when read
  return std::make_unique<PackedMatrix>(std::move(matrix), settled);
}

}  // namespace kt::inline weights
