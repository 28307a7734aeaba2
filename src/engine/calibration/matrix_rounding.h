// What calibrated rounding of an expert and of a matrix that every token visits have in common: factors,
// rounding on several threads, the trial against rounding to nearest, and its figures.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/function_ref.h"
#include "base/pool.h"
#include "formats/matrix.h"
#include "nn/gptq.h"
#include "weights/experts.h"

namespace kt::inline engine {

// Rows of activations that are multiplied together: adding their moments to H costs as much as multiplying
// 500.
inline constexpr int64_t kRowsTogether = 2048;

enum class RoundedBy : uint8_t { kGptq, kNoTokens, kFewTokens, kNotBetter, kSingular, kKept };
std::string_view name_of(RoundedBy by);  // "gptq", "rtn: no tokens", ..., "kept"

// Squared errors are sums over held-out rows of (weight * |output - original's output|)^2; all 0 where the
// original's own outputs are not finite. kKept: nothing was to be rounded; figures are 0 but for tokens.
struct ExpertFigures {
  RoundedBy by = RoundedBy::kGptq;
  int64_t tokens = 0, held_out = 0;
  double signal = 0, rtn_error = 0, error = 0;  // error: of what was chosen
  std::optional<double> gptq_error =
      {};  // of what calibration gave, chosen or not; none where it gave nothing
  double damping = 0, down_damping = 0;  // that worked; 0 where nothing was factored
};

// Enough to go on: fewer tokens than the floor, or none to try the result with, are not.
bool too_few(const ExpertFigures& figures, const CalibrationDefaults& options);
// After the trial of what calibration gave, or of nothing where `calibrated` is false: sets `by` and
// `gptq_error`, and `error` where rounding to nearest stays. True: take what calibration gave.
bool decide(ExpertFigures& figures, const CalibrationDefaults& options, bool calibrated);

// sum over rows of (weight * |other - y|)^2; of y itself where `other` is null; weights null: all 1.
double squared_error(const float* y, const float* other, size_t rows, size_t width, const float* weights);

// Nothing where no damping helps, or moments are not finite, which is as good as none.
std::optional<GptqFactor> factor_of(FunctionRef<Hessian()> moments, const GptqOptions& options);
// gptq() on all workers of the pool; the same bytes.
Matrix gptq(Pool& pool, const Format& format, std::span<const float> values, int64_t n, int64_t k,
            const GptqFactor& factor);

// A matrix to compute with, where its own format may have no kernel: 8-bit codes get f32 scales, of the same
// values. The matrix must outlive it.
class RunnableView {
 public:
  explicit RunnableView(const Matrix& matrix);
  RunnableView(const RunnableView&) = delete;
  const MatrixView& view() const { return view_; }
  static Format format_of(Format format);

 private:
  std::vector<float> scales_;
  MatrixView view_;
};

// The same as a stored matrix that holds its own copy, for those who read in pieces.
std::unique_ptr<StoredMatrix> runnable(const Matrix& matrix, std::string_view name);

}  // namespace kt::inline engine
