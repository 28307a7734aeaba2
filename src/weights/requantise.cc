#include "weights/requantise.h"

#include "base/error.h"

namespace kt {
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
    return quantise(format, values, count, k);
  }
  int64_t rows_at_once() const override { return from_->rows_at_once(); }
  void read_ahead() const override { from_->read_ahead(); }
  uint64_t held_bytes() const override { return from_->held_bytes(); }

 private:
  std::unique_ptr<StoredMatrix> from_;
};

class RoundedExperts : public ExpertSource {
 public:
  RoundedExperts(const ExpertSource& source, const RoundedFormats& formats, std::string_view dialect)
      : source_(source), formats_(formats), dialect_(dialect) {}
  std::string_view dialect() const override { return dialect_; }
  std::vector<int> layers() const override { return source_.layers(); }
  int experts() const override { return source_.experts(); }
  int64_t hidden() const override { return source_.hidden(); }
  int64_t inter() const override { return source_.inter(); }
  std::unique_ptr<StoredMatrix> at(int layer, int expert, Projection projection) const override {
    auto matrix = source_.at(layer, expert, projection);
    const auto& format = projection == Projection::kDown ? formats_.down : formats_.gate_up;
    if (!format || *format == matrix->format) return matrix;
    if (formats_.through_bf16 && matrix->format.code != Code::kBf16)
      matrix = requantised(std::move(matrix), format_named("bf16"));
    return requantised(std::move(matrix), *format);
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
  RoundedFormats formats_;
  std::string dialect_;
};

}  // namespace

std::unique_ptr<ExpertSource> requantised(const ExpertSource& source, const Format& format) {
  return std::make_unique<RoundedExperts>(source, RoundedFormats{.gate_up = format, .down = format},
                                          name_of(format));
}

std::unique_ptr<ExpertSource> requantised(const ExpertSource& source, const RoundedFormats& formats) {
  return std::make_unique<RoundedExperts>(source, formats, source.dialect());
}

std::unique_ptr<StoredMatrix> requantised(std::unique_ptr<StoredMatrix> matrix, const Format& format) {
  return std::make_unique<RoundedMatrix>(std::move(matrix), format);
}

}  // namespace kt
