// What a position does to queries and keys: rotary embeddings with the frequencies of every scaling people use, and
// queries that grow.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/row_ops.h"

namespace kt::inline nn {

// Rotary positions. Pairs are (i, i + dims / 2), or (2 i, 2 i + 1) where interleaved. Only the first `dims`
// of a head are rotated.
struct RopeSpec {
  int dims = 0;
  double theta = 10000;
  bool interleaved = false;
  enum class Scaling { kNone, kLinear, kYarn, kLlama3 } scaling = Scaling::kNone;
  double factor = 1;
  int original_context = 0;                          // yarn, llama3
  double beta_fast = 32, beta_slow = 1;              // yarn
  bool truncate = true;                              // yarn: correction range rounded to whole dimensions
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  double attention_factor = 1;                       // cosines and sines are multiplied by it
  std::vector<double> divisors = {};                 // [dims / 2] of each frequency; empty: none
  int still = 0;  // so many pairs, the last ones, have no frequency: they stay
  bool operator==(const RopeSpec&) const = default;
};

// Queries that grow with their position, so that a softmax over more keys stays as sharp: q at position t is
// multiplied by 1 + beta ln(1 + floor((t + ahead) / length)).
struct QueryGrowth {
  double beta = 0;  // 0: they do not grow
  int length = 1, ahead = 0;
  bool operator==(const QueryGrowth&) const = default;
  float factor(int position) const;  // exactly 1 where t + ahead is below `length`
};

class Rope {
 public:
  explicit Rope(const RopeSpec& spec);

  // Cosines and sines of one position, [dims / 2] each: a step computes them once for all layers.
  void angles(int position, float* cosines, float* sines) const;
  // Rotates `heads` heads of one token in place; head h starts at x + h * stride, its first spec.dims numbers
  // are rotated.
  void rotate(const RowKernels& rows, float* x, int heads, int64_t stride, const float* cosines,
              const float* sines) const;
  const RopeSpec& spec() const { return spec_; }

 private:
  RopeSpec spec_;
  std::vector<double> frequencies_;  // [dims / 2] radians a position
};

}  // namespace kt::inline nn
