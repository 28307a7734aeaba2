// Calibrated rounding of one matrix: column by column, each column's rounding error is pushed into the
// columns that are not rounded yet, as far as the inputs' second moments say that they can make up for it.
//
// With H = G^T G (G lower) the squared error of the outputs, trace((W - Q) H (W - Q)^T), is the sum over
// columns c of G[c,c]^2 |e[c]|^2, e[c] = (w - q)[c] + sum over i < c of (w - q)[i] * G[c,i] / G[c,c]. So each
// column is rounded to what is nearest to its value plus that sum. This is what the usual formulation with
// the Cholesky factor of H^-1 computes, without inverting anything: half of the work and more digits.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "formats/matrix.h"
#include "nn/hessian.h"

namespace kt::inline nn {

struct GptqOptions {
  // Of the mean of H's diagonal, added to it; raised tenfold on a failed factorisation, up to kMostDamping.
  double damping = 0.01;
  bool act_order = false;  // columns of large H first; groups and their scales stay where they are
  int block = 64;          // columns between two products with what all columns before them gave up
  // Scales tried for every span, evenly from round-to-nearest's down to least_scale of it, for the least
  // squared error of the span's values, each weighed with G[c,c]^2. 0: round-to-nearest's. Formats with mins,
  // super-blocks or scales that are powers of two take round-to-nearest's.
  int scale_steps = 0;
  double least_scale = 0.7;
  // Whatever the type of scales: largest magnitude / (2^(bits-1) - 1/2), never negative, and all codes of
  // the type, as compressed-tensors has it. For integers without mins; false: as quantise() does.
  bool packed_rule = false;
};

// What measured best for experts, symmetric 4 bits in groups of 128: squared error of experts' outputs on
// 4k tokens of book text, relative to round-to-nearest's, calibrated with 12k tokens of other book text / of
// chat text that is nothing like it. Eight experts in each of two layers of a small trained model, inputs of
// the model as it was; settings were chosen on these very numbers, so they flatter a little:
//
//   plain, damping 0.03                   0.71 0.70 / 1.21 1.24       the usual way: harmful off its text
//   + scale search                        0.61 0.56 / 1.09 1.05       (search alone: 0.91 0.82)
//   + down shrunk to its diagonal         0.60 0.55 / 0.99 1.00       (not shrunk: 1.21 1.22)
//   + damping 0.5                         0.61 0.55 / 0.82 0.87       (1: 0.64 0.57 / 0.82 0.81)
//   + activation order                    0.55 0.55 / 0.80 0.87       (at a damping of 0.03: 1.19 1.23)
//   shrinkage 64 or 1024, unordered       0.60 0.55 / 0.84 0.88 and 0.64 0.57 / 0.82 0.87
//   damping 0.1 instead of 0.5            0.51 0.53 / 0.90 1.02       better on its text, no gain off it
//
// and on another model, which routes in another way: plain 0.82 0.73 / 1.33 1.33, all of it 0.65 0.58 /
// 0.90 1.00 (damping 0.3: 0.63 0.57 / 0.94 1.07; search alone: 0.86 0.85).
struct CalibrationDefaults {
  GptqOptions gptq{.damping = 0.5, .act_order = true, .scale_steps = 12, .least_scale = 0.7};
  double shrinkage = 256;  // rows: strength of shrunk() for gate and up and of shrunk_to_diagonal() for down
  int64_t floor = 32;      // rows below which an expert is rounded to nearest
};

inline constexpr double kMostDamping = 10;

// The factor that rounding needs; one for all matrices that share inputs (gate and up).
class GptqFactor {
 public:
  // H may be all zeros (an expert without tokens): an Error(kInput); callers round to nearest then. So are
  // entries not finite, and an H that no damping up to kMostDamping makes positive. Dead columns (zero
  // diagonal) are rounded to nearest and take no part.
  GptqFactor(const Hessian& hessian, const GptqOptions& options);
  double damping() const { return damping_; }  // that worked
  int dims() const { return static_cast<int>(order_.size()); }
  const GptqOptions& options() const { return options_; }
  std::span<const int> order() const { return order_; }  // [dims] column taken at each step
  // [dims, dims], rows and columns in that order: below the diagonal G[c,i] / G[c,c], on it G[c,c]; above it
  // anything.
  const float* lower() const { return lower_.as<float>().data(); }

 private:
  GptqOptions options_;
  double damping_ = 0;
  std::vector<int> order_;
  Buffer lower_;
};

// values [n, k] in plain order -> `format`. Scales are those of round-to-nearest over what a group's columns
// hold when the group is begun (of the original values with act_order: static groups), or what a search below
// them found. Codes are the nearest to those scales; int4 per row knows no second rounding here. Rows are
// independent: any cut into rows gives the same bytes. One thread; scratch of a few hundred rows. An
// Error(kUnsupported) names a format without scales or with scales that several rows share.
Matrix gptq(const Format& format, std::span<const float> values, int64_t n, int64_t k,
            const GptqFactor& factor);

// trace((W - Q) H (W - Q)^T): the squared error of the outputs over the rows of H.
double output_error(std::span<const float> values, const MatrixView& rounded, const Hessian& hessian);

}  // namespace kt::inline nn
