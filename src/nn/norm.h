// Root-mean-square norms of rows.
#pragma once
#include <cmath>
#include <cstdint>

namespace kt {

// y = x / sqrt(mean(x^2) + eps) * weight, n numbers; y may be x.
inline void rms_norm(const float* x, const float* weight, double eps, int n, float* y) {
  // Eight sums, because one would be a chain of additions a compiler may not break up.
  float sums[8] = {};
  int i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; ++j) sums[j] += x[i + j] * x[i + j];
  for (; i < n; ++i) sums[0] += x[i] * x[i];
  const float sum = ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
  const float factor = 1 / std::sqrt(sum / static_cast<float>(n) + static_cast<float>(eps));
  for (i = 0; i < n; ++i) y[i] = x[i] * factor * weight[i];
}

}  // namespace kt
