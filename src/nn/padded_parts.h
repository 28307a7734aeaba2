// Experts whose down has a scale for so many columns as no kernel multiplies: converted weights that were cut for NUMA
// nodes, 1408 columns in 8 parts of 176. They run with a wider `inter`: every part is filled up to whole chunks, in
// rows of gate and up and in columns of down. What is added has scales and biases of zero; f(0, 0) = 0 is what down
// reads of it, and no sum changes.
#pragma once
#include <cstdint>
#include <vector>

#include "nn/experts.h"

namespace kt::inline nn {

struct PaddedParts {
  int64_t inter = 0, part = 0,
          padded = 0;  // columns of all, and of a part before and after; part 0: nothing is padded

  explicit operator bool() const { return part > 0; }
  int64_t parts() const { return (inter + part - 1) / part; }
  int64_t width() const { return part > 0 ? parts() * padded : inter; }
  int64_t at(int64_t i) const { return i / part * padded + i % part; }  // where row or column i stands
  // The row or column that stands at `i`, or -1 for what was added.
  int64_t narrow(int64_t i) const {
    const Stretch here = stretch(i, 1);
    return here.count > 0 ? here.first : -1;
  }
  // From wide column i on: `wide` columns, at most `most`, of which the first `count` are columns [first, first +
  // count).
  struct Stretch {
    int64_t first;
    int count, wide;
  };
  Stretch stretch(int64_t i, int most) const;
  Format down(Format format) const;

  // Readers of the wide matrices. `from` must outlive them.
  RowReader wide_rows(const RowReader& from) const;
  RowReader wide_columns(const RowReader& from) const;
  std::vector<float> wide_bias(const float* from) const;  // empty where there is none
  // Row `from` of a wide gate or up as row `to`, and the first rows of a wide down, back.
  static void narrow_row(const Matrix& wide, int64_t from, Matrix& out, int64_t to);
  void narrow_columns(const Matrix& wide, int64_t rows, Matrix& out) const;
};

// A matrix in memory, with a scale for each row; it must outlive the reader.
RowReader reader_of_rows(const MatrixView& matrix);

PaddedParts padded_parts(const ExpertsOptions& options, int64_t inter);

}  // namespace kt::inline nn
