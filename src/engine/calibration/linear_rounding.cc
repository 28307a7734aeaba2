#include "engine/calibration/linear_rounding.h"

#include <algorithm>

#include "base/error.h"
#include "formats/floats.h"

namespace kt::inline engine {

LinearRounder::LinearRounder(std::shared_ptr<Pool> pool, int64_t k, const CalibrationDefaults& options)
    : pool_(std::move(pool)), k_(k), options_(options), linears_(pool_), moments_(static_cast<int>(k)) {
  options_.gptq.packed_rule = true;
}

uint64_t LinearRounder::bytes(int64_t n, int64_t k, int64_t held_out) {
  const auto rows = static_cast<uint64_t>(n), width = static_cast<uint64_t>(k),
             held = static_cast<uint64_t>(held_out);
  // Values, codes of two ways of rounding, packings of three; moments, shrunk ones and their factor's two
  // halves; rows held out, in a vector that grows; rows on their way.
  return rows * width * (4 + 2 + 6) + 4 * 4 * width * width + 2 * held * width * 2 +
         kRowsTogether * (width * 6 + rows * 8) + (uint64_t{48} << 20);
}

void LinearRounder::add(const float* x, int64_t stride, std::span<const int32_t> train,
                        std::span<const int32_t> held_out) {
  moments_.add(
      *pool_, {.x = x, .type = Real::kF32, .stride = stride, .rows = std::ssize(train), .pick = train.data()},
      &scratch_);
  for (const int32_t row : held_out)
    for (int64_t c = 0; c < k_; ++c) held_out_.push_back(to_bf16(x[row * stride + c]).bits);
}

void LinearRounder::judge(const StoredMatrix& stored, const Matrix& rtn, const Matrix& other,
                          ExpertFigures& figures) {
  const auto packed = [&](const Matrix& matrix) {
    const Pool& pool = *pool_;
    return Linear(pool, RunnableView(matrix).view(), {}, {.precision = Precision::kBf16}, stored.name);
  };
  const Linear reference = packed(stored.matrix()), nearest = packed(rtn), calibrated = packed(other);
  const auto n = static_cast<size_t>(stored.n), k = static_cast<size_t>(k_),
             chunk = static_cast<size_t>(kRowsTogether);
  std::vector<float> x(chunk * k), y(chunk * n), other_y(chunk * n);
  const auto rows = static_cast<size_t>(figures.held_out);
  for (size_t first = 0; first < rows; first += chunk) {
    const size_t count = std::min(chunk, rows - first);
    for (size_t i = 0; i < count * k; ++i) x[i] = to_f32(bf16{held_out_[first * k + i]});
    const auto multiply = [&](const Linear& linear, float* out) {
      const LinearCall call{&linear, x.data(), k_, out, stored.n};
      linears_.run(static_cast<int>(count), {&call, 1});
    };
    multiply(reference, y.data());
    figures.signal += squared_error(y.data(), nullptr, count, n, nullptr);
    multiply(nearest, other_y.data());
    figures.rtn_error += squared_error(y.data(), other_y.data(), count, n, nullptr);
    multiply(calibrated, other_y.data());
    figures.error += squared_error(y.data(), other_y.data(), count, n, nullptr);
  }
}

RoundedLinear LinearRounder::round(const StoredMatrix& stored, const PackedSpec& spec) {
  KT_CHECK(stored.k == k_, "{}: {} columns, inputs have {}", stored.name, stored.k, k_);
  std::vector<float> values(static_cast<size_t>(stored.n * stored.k));
  stored.values(0, stored.n, values.data());
  RoundedLinear rtn{.matrix = round_packed(spec, stored.n, stored.k, values.data(), stored.name),
                    .figures = {}};
  RoundedLinear out;
  ExpertFigures& figures = out.figures;
  figures.tokens = moments_.rows();
  figures.held_out = static_cast<int64_t>(held_out_.size()) / k_;
  bool done = false;
  if (!too_few(figures, options_)) {
    if (!factor_)
      factor_ = factor_of([&] { return shrunk_to_diagonal(moments_, options_.shrinkage); }, options_.gptq);
    if (*factor_) {
      figures.damping = (*factor_)->damping();
      out.matrix = gptq(*pool_, packed_format(spec), values, stored.n, stored.k, **factor_);
      done = true;
    }
  }
  if (figures.tokens > 0) judge(stored, rtn.matrix, done ? out.matrix : rtn.matrix, figures);
  if (decide(figures, options_, done)) return out;
  rtn.figures = figures;
  return rtn;
}

}  // namespace kt::inline engine
