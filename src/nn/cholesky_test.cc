#include "nn/cholesky.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace kt::inline nn {
namespace {

// X^T X + I of random X, in f64.
std::vector<double> positive(int n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, 1);
  std::vector<double> x(static_cast<size_t>(n) * 20), out(static_cast<size_t>(n) * n);
  for (double& value : x) value = normal(random);
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) {
      double sum = i == j;
      for (int k = 0; k < 20; ++k)
        sum += x[static_cast<size_t>(i * 20 + k)] * x[static_cast<size_t>(j * 20 + k)];
      out[static_cast<size_t>(i * n + j)] = sum;
    }
  return out;
}

TEST(Cholesky, GivesTheMatrixBack) {
  for (const int n : {1, 2, 17, 128, 129, 300, 513}) {
    const std::vector<double> a = positive(n, 1);
    const int stride = n + 3;
    std::vector<float> g(static_cast<size_t>(n * stride), -7);
    for (int i = 0; i < n; ++i)
      for (int j = 0; j <= i; ++j)
        g[static_cast<size_t>(i * stride + j)] = static_cast<float>(a[static_cast<size_t>(i * n + j)]);
    ASSERT_TRUE(factor(g.data(), n, stride));
    for (int i = 0; i < n; ++i) {
      for (int j = i + 1; j < stride; ++j) ASSERT_EQ(g[static_cast<size_t>(i * stride + j)], -7);
      for (int j = 0; j <= i; ++j) {
        double sum = 0;
        for (int k = i; k < n; ++k)
          sum += static_cast<double>(g[static_cast<size_t>(k * stride + i)]) *
                 static_cast<double>(g[static_cast<size_t>(k * stride + j)]);
        // Backward error of a factorisation in f32, n * 2^-24 of the diagonal (about 20), and of the inverses
        // of its diagonal blocks, whose condition is that of A's root: about 30.
        ASSERT_NEAR(sum, a[static_cast<size_t>(i * n + j)], 30 * 40 * (n + 8) * 0x1p-24)
            << n << ": " << i << ", " << j;
      }
    }
  }
}

TEST(Cholesky, RefusesWhatIsNotPositive) {
  for (const int n : {3, 200}) {
    std::vector<float> a(static_cast<size_t>(n * n));
    for (int i = 0; i < n; ++i) a[static_cast<size_t>(i * n + i)] = 1;
    std::vector<float> b = a;
    EXPECT_TRUE(factor(b.data(), n, n));
    b = a;
    b[static_cast<size_t>(n * n - n)] = 1.5f;  // the last row's first: 1 - 1.5^2 is left of the first pivot
    EXPECT_FALSE(factor(b.data(), n, n));
    b = a;
    b[0] = std::nanf("");
    EXPECT_FALSE(factor(b.data(), n, n));
    b = a;
    b[0] = 0;
    EXPECT_FALSE(factor(b.data(), n, n));
  }
}

}  // namespace
}  // namespace kt::inline nn
