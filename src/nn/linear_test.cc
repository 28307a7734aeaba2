#include "nn/linear.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "base/error.h"

namespace kt {
namespace {

std::vector<float> random_values(size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> out(n);
  for (float& x : out) x = normal(random);
  return out;
}

struct Case {
  Matrix weights;
  std::vector<float> bias, dense;
  Case(std::string_view format, int64_t n, int64_t k, unsigned seed)
      : weights(quantise(format_named(format), random_values(static_cast<size_t>(n * k), seed), n, k)),
        bias(random_values(static_cast<size_t>(n), seed + 1)),
        dense(static_cast<size_t>(n * k)) {
    dequantise(weights.view(), dense);
  }
  double expected(const float* x, int64_t row) const {
    double sum = bias[static_cast<size_t>(row)];
    for (int64_t i = 0; i < weights.k; ++i)
      sum += static_cast<double>(x[i]) * dense[static_cast<size_t>(row * weights.k + i)];
    return sum;
  }
};

TEST(Linear, EveryFormatAgainstDouble) {
  const auto pool = std::make_shared<Pool>(
      PoolOptions{.threads = 2, .nodes = 2, .topology = Topology::synthetic("numa:2 core:1")});
  LinearWork work(pool);
  for (const char* format : {"f32", "bf16", "int8", "int4_g32", "fp8", "q4_k"}) {
    const Case a(format, 100, 256, 1), b(format, 256, 256, 5);
    const Linear first(*pool, a.weights.view(), a.bias, {.precision = Precision::kF32}, "a");
    const Linear second(*pool, b.weights.view(), b.bias, {.precision = Precision::kF32}, "b");
    for (const int m : {1, 3, 40}) {
      const std::vector<float> x = random_values(static_cast<size_t>(m) * 260, 9);
      std::vector<float> y(static_cast<size_t>(m) * 101, -7), z(static_cast<size_t>(m) * 256);
      const LinearCall calls[] = {{&first, x.data(), 260, y.data(), 101},
                                  {&second, x.data(), 260, z.data(), 256}};
      work.run(m, calls);
      // f32 sums of 256 products of magnitude about 3 in any order: below 256 * 2^-24 * 256
      for (int i = 0; i < m; ++i) {
        for (int64_t n = 0; n < 100; ++n)
          ASSERT_NEAR(y[static_cast<size_t>(i * 101 + n)], a.expected(x.data() + i * 260, n), 4e-3)
              << format << m;
        EXPECT_EQ(y[static_cast<size_t>(i * 101 + 100)], -7);
        for (int64_t n = 0; n < 256; ++n)
          ASSERT_NEAR(z[static_cast<size_t>(i * 256 + n)], b.expected(x.data() + i * 260, n), 4e-3)
              << format << m;
      }
    }
  }
}

TEST(Linear, SameBitsForAnyThreadCount) {
  const Case c("int8", 333, 320, 3);
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 2, 3}) {
    const auto pool = std::make_shared<Pool>(PoolOptions{.threads = threads, .pin = false});
    LinearWork work(pool);
    const Linear linear(*pool, c.weights.view(), c.bias, {}, "c");
    std::vector<float> all;
    for (const int m : {1, 5, 70}) {
      const std::vector<float> x = random_values(static_cast<size_t>(m) * 320, 4);
      std::vector<float> y(static_cast<size_t>(m) * 333);
      const LinearCall call{&linear, x.data(), 320, y.data(), 333};
      work.run(m, {&call, 1});
      all.insert(all.end(), y.begin(), y.end());
    }
    results.push_back(all);
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(Linear, BadBias) {
  const Pool pool({.threads = 1});
  const Case c("bf16", 32, 64, 1);
  const std::vector<float> bias(31);
  try {
    const Linear linear(pool, c.weights.view(), bias, {}, "q_proj");
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "q_proj: expected 32 biases, got 31");
  }
}

}  // namespace
}  // namespace kt
