#include "engine/calibration/matrix_rounding.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace kt::inline engine {
namespace {

class RunnableMatrix : public StoredMatrix {
 public:
  RunnableMatrix(const Matrix& matrix, std::string_view module) {
    const RunnableView from(matrix);
    const MatrixView& view = from.view();
    name = module;
    format = view.format;
    n = view.n;
    k = view.k;
    whole_ = Matrix(format, n, k);
    std::copy_n(view.codes, whole_.codes.size(), whole_.codes.data());
    std::copy_n(view.scales, whole_.scales.size(), whole_.scales.data());
  }
  Matrix rows(int64_t first, int64_t count) const override {
    Matrix out(format, count, k);
    const auto copy = [&](const std::vector<uint8_t>& from, std::vector<uint8_t>& to) {
      std::copy_n(from.data() + static_cast<int64_t>(from.size()) / n * first, to.size(), to.data());
    };
    copy(whole_.codes, out.codes);
    copy(whole_.scales, out.scales);
    return out;
  }

 private:
  Matrix whole_;
};

}  // namespace

std::string_view name_of(RoundedBy by) {
  switch (by) {
    case RoundedBy::kGptq:
      return "gptq";
    case RoundedBy::kNoTokens:
      return "rtn: no tokens";
    case RoundedBy::kFewTokens:
      return "rtn: few tokens";
    case RoundedBy::kNotBetter:
      return "rtn: gptq was not better";
    case RoundedBy::kSingular:
      return "rtn: singular";
    case RoundedBy::kKept:
      return "kept";
  }
  return "";
}

bool too_few(const ExpertFigures& figures, const CalibrationDefaults& options) {
  return figures.tokens < options.floor || figures.held_out == 0;
}

bool decide(ExpertFigures& figures, const CalibrationDefaults& options, bool calibrated) {
  const bool trial = std::isfinite(figures.signal) && std::isfinite(figures.rtn_error);
  if (!trial) figures.signal = figures.rtn_error = figures.error = 0;
  if (calibrated && trial && std::isfinite(figures.error)) figures.gptq_error = figures.error;
  if (figures.tokens == 0) {
    figures.by = RoundedBy::kNoTokens;
  } else if (too_few(figures, options)) {
    figures.by = RoundedBy::kFewTokens;
  } else if (!calibrated || !trial) {
    figures.by = RoundedBy::kSingular;
  } else if (figures.error < figures.rtn_error) {
    figures.by = RoundedBy::kGptq;
    return true;
  } else {
    figures.by = RoundedBy::kNotBetter;
  }
  figures.error = figures.rtn_error;
  return false;
}

double squared_error(const float* y, const float* other, size_t rows, size_t width, const float* weights) {
  double total = 0;
  for (size_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (size_t c = r * width; c < (r + 1) * width; ++c) {
      const double off = other ? double{other[c]} - double{y[c]} : double{y[c]};
      sum += off * off;
    }
    const double weight = weights ? double{weights[r]} : 1;
    total += weight * weight * sum;
  }
  return total;
}

std::optional<GptqFactor> factor_of(FunctionRef<Hessian()> moments, const GptqOptions& options) {
  try {
    return std::optional<GptqFactor>(GptqFactor(moments(), options));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kInput) throw;
    return std::nullopt;
  }
}

Matrix gptq(Pool& pool, const Format& format, std::span<const float> values, int64_t n, int64_t k,
            const GptqFactor& factor) {
  constexpr int64_t kLeastRows = 64;  // that make a piece worth its own pass over the factor
  const int64_t step = std::max(kLeastRows, (n + 2 * pool.threads() - 1) / (2 * pool.threads()));
  if (pool.threads() == 1 || n <= step) return gptq(format, values, n, k, factor);
  Matrix out(format, n, k);
  run_items(pool, (n + step - 1) / step, [&](int64_t piece) {
    const int64_t first = piece * step, count = std::min(step, n - first);
    const Matrix part =
        gptq(format, values.subspan(static_cast<size_t>(first * k), static_cast<size_t>(count * k)), count, k,
             factor);
    std::ranges::copy(part.codes, out.codes.data() + static_cast<int64_t>(out.codes.size()) / n * first);
    std::ranges::copy(part.scales, out.scales.data() + static_cast<int64_t>(out.scales.size()) / n * first);
  });
  return out;
}

Format RunnableView::format_of(Format format) {
  if (format.code == Code::kI8 && format.span.n == 1 &&
      (format.scale == Scale::kBf16 || format.scale == Scale::kF16))
    format.scale = Scale::kF32;
  return format;
}

RunnableView::RunnableView(const Matrix& matrix) : view_(matrix.view()) {
  const Format format = format_of(matrix.format);
  if (format == matrix.format) return;
  const int64_t across = spans(format, matrix.k), length = format.span.k ? format.span.k : matrix.k;
  for (int64_t r = 0; r < matrix.n; ++r)
    for (int64_t s = 0; s < across; ++s) scales_.push_back(scale_at(matrix.view(), r, s * length));
  view_.format = format;
  view_.scales = reinterpret_cast<const uint8_t*>(scales_.data());
}

std::unique_ptr<StoredMatrix> runnable(const Matrix& matrix, std::string_view name) {
  return std::make_unique<RunnableMatrix>(matrix, name);
}

}  // namespace kt::inline engine
