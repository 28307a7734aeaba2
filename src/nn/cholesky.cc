#include "nn/cholesky.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace kt {
namespace {

constexpr int kBlock = 64;

// The diagonal block [n, n] at a, in f64: its pivots are what a hard matrix loses its digits in.
bool factor_diagonal(float* a, int n, int64_t stride) {
  double g[kBlock][kBlock];
  for (int i = 0; i < n; ++i)
    for (int j = 0; j <= i; ++j) g[i][j] = a[i * stride + j];
  for (int i = n - 1; i >= 0; --i) {
    const double pivot = g[i][i];
    if (!(pivot > 0) || !std::isfinite(pivot)) return false;
    const double inverse = 1 / std::sqrt(pivot);
    for (int j = 0; j <= i; ++j) g[i][j] *= inverse;
    for (int r = 0; r < i; ++r)
      for (int c = 0; c <= r; ++c) g[r][c] -= g[i][r] * g[i][c];
  }
  for (int i = 0; i < n; ++i)
    for (int j = 0; j <= i; ++j) a[i * stride + j] = static_cast<float>(g[i][j]);
  return true;
}

// y -= factor * x
void subtract(float* __restrict y, const float* __restrict x, float factor, int n) {
  for (int i = 0; i < n; ++i) y[i] -= factor * x[i];
}

}  // namespace

bool factor(float* a, int n, int64_t stride) {
  for (int end = n; end > 0; end -= kBlock) {
    const int begin = std::max(0, end - kBlock);
    float* diagonal = a + begin * stride + begin;
    if (!factor_diagonal(diagonal, end - begin, stride)) return false;
    // Rows of the panel left of the block: G_bb^T P = A, from the last row up.
    for (int i = end - 1; i >= begin; --i) {
      float* row = a + i * stride;
      for (int j = end - 1; j > i; --j) subtract(row, a + j * stride, a[j * stride + i], begin);
      const float inverse = 1 / a[i * stride + i];
      for (int c = 0; c < begin; ++c) row[c] *= inverse;
    }
    for (int r = 0; r < begin; ++r)
      for (int i = begin; i < end; ++i) subtract(a + r * stride, a + i * stride, a[i * stride + r], r + 1);
  }
  return true;
}

}  // namespace kt
