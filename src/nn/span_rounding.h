// Scales of spans and codes against them, for rows that stand side by side: the part of calibrated rounding
// that knows what a format is. Every code is the nearest one.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "formats/matrix.h"
#include "kernels/gram.h"

namespace kt::inline nn {

// Scales below round-to-nearest's, evenly down to `least` of it; 0 steps: none is tried.
struct ScaleSearch {
  int steps = 0;
  double least = 1;
};

// Rows [first, first + rows) of `out`. Values come in blocks of kBlockRows rows: [blocks, columns,
// kBlockRows]; rows past the last are zeros.
class SpanRounding {
 public:
  // Error(kUnsupported) if the format has no scales or shares them among rows. packed_rule: GptqOptions';
  // Error(kUnsupported) for a format that has no such rule.
  SpanRounding(Matrix& out, int64_t first, int64_t rows, bool packed_rule = false);

  // Columns whose scales are found together: a span, a super-block or the whole row.
  int step() const { return step_; }
  // The scales of columns [column, column + step) from their values, block after block `block_stride` floats
  // apart. weight: [step] what the squared error of each column counts in a search.
  void begin(int column, const float* values, int64_t block_stride, const float* weight,
             const ScaleSearch& search);
  // Codes of one column, after begin() of its span: [blocks, kBlockRows], for store(). `rest` loses what they
  // stand for; blocks of it and of values are block_stride floats apart.
  void round(int column, const float* values, float* rest, int64_t block_stride, uint8_t* codes);
  // Codes of all columns into the matrix. steps: [k] where the codes of each column are: [steps, blocks,
  // kBlockRows].
  void store(const uint8_t* codes, std::span<const int> steps);

 private:
  using Lanes = RoundingLanes;
  Lanes& lanes(int span, int block) { return lanes_[static_cast<size_t>(span * blocks_ + block)]; }
  int rows_of(int block) const;
  void store_factors(int column, int64_t row, const Matrix& rounded);
  void read(int span, int block);
  void begin_packed(int column, int columns, int block, const float* values);
  void begin_nearest(int column, int columns, int block, const float* values);
  void search(int span, int block, const float* values, int columns, const float* weight,
              const ScaleSearch& search);
  void errors(const Lanes& l, const float* scale, const float* values, int columns, const float* weight,
              float* error) const;

  Matrix& out_;
  int64_t first_, rows_;
  bool packed_rule_;
  int step_, span_k_, blocks_;
  std::vector<Lanes> lanes_;  // [spans, blocks]
  const GramKernels& kernels_ = gram_kernels(best_kernels());
};

}  // namespace kt::inline nn
