// Scales of spans and codes against them, for rows that stand side by side: the part of calibrated rounding
// that knows what a format is. Every code is the nearest one.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "formats/matrix.h"
#include "kernels/layout.h"

namespace kt {

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
  // Codes of one column of one block of rows, after begin() of its span; `rounded` is what they stand for.
  void round(int column, int block, const float* values, float* rounded);

 private:
  // What a span's rows share a column's arithmetic with: value = code * scale - min for lowest <= code <=
  // highest, and what is stored is code + offset.
  struct Lanes {
    float scale[kBlockRows], divisor[kBlockRows], min[kBlockRows];
    float lowest[kBlockRows], highest[kBlockRows], offset[kBlockRows];
  };
  Lanes& lanes(int span, int block) { return lanes_[static_cast<size_t>(span * blocks_ + block)]; }
  int rows_of(int block) const;
  void store_factors(int column, int64_t row, const Matrix& rounded);
  void read(int span, int block);
  void begin_packed(int column, int columns, int block, const float* values);
  void begin_nearest(int column, int columns, int block, const float* values);
  void search(int span, int block, const float* values, int columns, const float* weight,
              const ScaleSearch& search);

  Matrix& out_;
  int64_t first_, rows_;
  bool packed_rule_;
  int step_, span_k_, blocks_;
  std::vector<Lanes> lanes_;  // [spans, blocks]
};

}  // namespace kt
