// Right-looking over blocks of 128 rows, from the last block up: the diagonal block and its inverse in f64,
// the rows left of it by a product with that inverse, and what is left of the triangle above by a product of
// those rows with themselves. All but the diagonal blocks runs at the speed of the f32 kernels.
#include "nn/cholesky.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "base/checked.h"
#include "base/memory.h"
#include "kernels/gram.h"

namespace kt::inline nn {
namespace {

constexpr int kBlock = 128;
constexpr int kTile = 256;

struct Diagonal {
  double g[kBlock][kBlock];                 // lower
  double inverse[kBlock][kBlock];           // of g; lower
  alignas(64) float upper[kBlock][kBlock];  // (g^-1)^T, zeros below the diagonal
};

// The block of n rows at `a`: its pivots are what a hard matrix loses its digits in.
bool factor_diagonal(float* a, int n, int64_t stride, Diagonal& d) {
  for (int i = 0; i < n; ++i)
    for (int j = 0; j <= i; ++j) d.g[i][j] = static_cast<double>(a[i * stride + j]);
  for (int i = n - 1; i >= 0; --i) {
    const double pivot = d.g[i][i];
    if (!(pivot > 0) || !std::isfinite(pivot)) return false;
    const double inverse = 1 / std::sqrt(pivot);
    for (int j = 0; j <= i; ++j) d.g[i][j] *= inverse;
    for (int r = 0; r < i; ++r)
      for (int c = 0; c <= r; ++c) d.g[r][c] -= d.g[i][r] * d.g[i][c];
  }
  for (int i = 0; i < n; ++i)
    for (int j = 0; j <= i; ++j) a[i * stride + j] = static_cast<float>(d.g[i][j]);
  return true;
}

void invert_diagonal(int n, Diagonal& d) {
  for (int i = 0; i < n; ++i) {
    double* row = d.inverse[i];
    std::fill_n(row, kBlock, 0.0);
    for (int j = 0; j < i; ++j)
      for (int c = 0; c <= j; ++c) row[c] -= d.g[i][j] * d.inverse[j][c];
    for (int c = 0; c < i; ++c) row[c] /= d.g[i][i];
    row[i] = 1 / d.g[i][i];
  }
  for (int i = 0; i < kBlock; ++i)
    for (int j = 0; j < kBlock; ++j)
      d.upper[i][j] = i < n && j < n ? static_cast<float>(d.inverse[j][i]) : 0.0f;
}

class Factoring {
 public:
  Factoring(float* a, int n, int64_t stride)
      : a_(a),
        n_(n),
        stride_(stride),
        memory_(sizeof(float) * static_cast<size_t>(round_up(n, kTile)) * kBlock * 2 +
                sizeof(float) * kTile * static_cast<size_t>(std::max(kTile, kBlock))),
        packed_(memory_.as<float>().data()),
        turned_(packed_ + int64_t{round_up(n, kTile)} * kBlock),
        sums_(turned_ + int64_t{round_up(n, kTile)} * kBlock),
        diagonal_(std::make_unique<Diagonal>()) {}
  bool run();

 private:
  void pack(int begin, int end);
  void solve(int begin, int end);
  void subtract(int begin);

  float* a_;
  int n_;
  int64_t stride_;
  const Kernels& kernels_ = best_kernels();
  const GramKernels& products_ = gram_kernels(kernels_);
  Buffer memory_;
  float* packed_;  // [columns / 16, 128, 16] rows of the panel
  float* turned_;  // [columns, 128] the same
  float* sums_;    // [256, 256]
  std::unique_ptr<Diagonal> diagonal_;
};

// Rows [begin, end), columns before begin, 16 side by side; zeros for rows and columns that are missing.
void Factoring::pack(int begin, int end) {
  for (int b = 0; b * kBlockRows < begin; ++b) {
    const int columns = std::min(kBlockRows, begin - b * kBlockRows);
    float* to = packed_ + int64_t{b} * kBlock * kBlockRows;
    std::fill_n(to, kBlock * kBlockRows, 0.0f);
    for (int i = begin; i < end; ++i, to += kBlockRows)
      std::copy_n(a_ + i * stride_ + b * kBlockRows, columns, to);
  }
}

// G_bb^T P = A for the panel P left of the diagonal block.
void Factoring::solve(int begin, int end) {
  pack(begin, end);
  for (int c = 0; c < begin; c += kTile) {
    const int columns = std::min(kTile, begin - c);
    products_.product_f32({.a = diagonal_->upper[0],
                           .a_stride = kBlock,
                           .m = end - begin,
                           .k = kBlock,
                           .b = packed_ + int64_t{c} * kBlock,
                           .b_stride = kBlock * kBlockRows,
                           .blocks = ceil_div(columns, kBlockRows),
                           .out = sums_,
                           .out_stride = kTile});
    for (int i = begin; i < end; ++i) std::copy_n(sums_ + (i - begin) * kTile, columns, a_ + i * stride_ + c);
  }
  pack(begin, end);
  for (int c = 0; c < begin; ++c) {
    const float* from = packed_ + int64_t{c / kBlockRows} * kBlock * kBlockRows + c % kBlockRows;
    float* to = turned_ + int64_t{c} * kBlock;
    for (int i = 0; i < kBlock; ++i) to[i] = from[i * kBlockRows];
  }
}

// The triangle before `begin` less the panel's product with itself.
void Factoring::subtract(int begin) {
  for (int r = 0; r < begin; r += kTile)
    for (int c = 0; c <= r; c += kTile) {
      const int rows = std::min(kTile, begin - r), columns = std::min(kTile, begin - c);
      products_.product_f32({.a = turned_ + int64_t{r} * kBlock,
                             .a_stride = kBlock,
                             .m = rows,
                             .k = kBlock,
                             .b = packed_ + int64_t{c} * kBlock,
                             .b_stride = kBlock * kBlockRows,
                             .blocks = ceil_div(columns, kBlockRows),
                             .out = sums_,
                             .out_stride = kTile});
      for (int i = 0; i < rows; ++i) {
        float* to = a_ + (r + i) * stride_ + c;
        const float* from = sums_ + i * kTile;
        kernels_.add_scaled(to, from, -1, std::min(columns, r + i - c + 1));
      }
    }
}

bool Factoring::run() {
  for (int end = n_; end > 0;) {
    const int begin = (end - 1) / kBlock * kBlock;
    if (!factor_diagonal(a_ + begin * stride_ + begin, end - begin, stride_, *diagonal_)) return false;
    if (begin > 0) {
      invert_diagonal(end - begin, *diagonal_);
      solve(begin, end);
      subtract(begin);
    }
    end = begin;
  }
  return true;
}

}  // namespace

bool factor(float* a, int n, int64_t stride) { return Factoring(a, n, stride).run(); }

}  // namespace kt::inline nn
