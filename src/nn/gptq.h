// Calibrated rounding of one matrix: column by column, each column's rounding error is pushed into the
// columns that are not rounded yet, as far as the inputs' second moments say that they can make up for it.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "formats/matrix.h"
#include "nn/hessian.h"

namespace kt {

struct GptqOptions {
  double damping =
      0.01;  // of the mean of H's diagonal, added to it; raised tenfold on a failed factorisation
  bool act_order = false;  // columns of large H first; groups and their scales stay where they are
  int block = 128;         // columns between two updates of the rest
};

// The factor that rounding needs; one for all matrices that share inputs (gate and up).
class GptqFactor {
 public:
  // H may be all zeros (an expert without tokens): an Error(kInput); callers round to nearest then. Dead
  // columns (zero diagonal) are rounded to nearest and take no part.
  GptqFactor(const Hessian& hessian, const GptqOptions& options);
  double damping() const { return damping_; }  // that worked
  const GptqOptions& options() const { return options_; }
  std::span<const int> order() const { return order_; }  // [dims] column taken at each step
  const float* upper() const;  // [dims, dims] upper Cholesky factor of H^-1, in that order

 private:
  GptqOptions options_;
  double damping_ = 0;
  std::vector<int> order_;
  Buffer upper_;
};

// values [n, k] in plain order -> `format`. Scales are those of round-to-nearest over what a group's columns
// hold when the group is begun (of the original values with act_order: static groups). Rows are independent.
Matrix gptq(const Format& format, std::span<const float> values, int64_t n, int64_t k,
            const GptqFactor& factor);

// trace((W - Q) H (W - Q)^T): the squared error of the outputs over the rows of H.
double output_error(std::span<const float> values, const MatrixView& rounded, const Hessian& hessian);

}  // namespace kt
