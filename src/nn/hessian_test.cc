#include "nn/hessian.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/error.h"
#include "base/testing/random_values.h"
#include "formats/floats.h"

namespace kt::inline nn {
namespace {

using ::testing::HasSubstr;

float rounded(float x) { return to_f32(to_bf16(x)); }

struct Sum {
  double value, magnitude;
};

Sum expected(const HessianRows& rows, int dims, int i, int j) {
  Sum sum{};
  for (int64_t t = 0; t < rows.rows; ++t) {
    const float* x = static_cast<const float*>(rows.x) +
                     (rows.pick ? rows.pick[t] : t) * (rows.stride ? rows.stride : dims);
    const float root = rows.weight ? std::sqrt(rows.weight[t]) : 1;
    const double product =
        static_cast<double>(rounded(x[i] * root)) * static_cast<double>(rounded(x[j] * root));
    sum.value += product;
    sum.magnitude += std::fabs(product);
  }
  return sum;
}

// Sums of f32 in any order: rows * 2^-24 of the magnitudes.
void check(const Hessian& h, const HessianRows& rows) {
  for (int i = 0; i < h.dims(); i += i < 20 || i > h.dims() - 20 ? 1 : 7)
    for (int j = 0; j <= i; j += j < 20 || j > i - 20 ? 1 : 7) {
      const Sum sum = expected(rows, h.dims(), i, j);
      const double bound = static_cast<double>(rows.rows) * 0x1p-24 * sum.magnitude + 1e-30;
      ASSERT_NEAR(h.data()[i * h.dims() + j], sum.value, bound) << i << " " << j << " of " << h.dims();
    }
}

TEST(Hessian, AgainstDouble) {
  for (const int dims : {1, 15, 16, 33, 256, 300, 513})
    for (const int64_t rows : {1, 7, 64, 65, 200}) {
      const auto x = random_values(static_cast<size_t>(rows * dims), 1);
      Hessian h(dims);
      const HessianRows all{.x = x.data(), .type = Real::kF32, .rows = rows};
      h.add(all);
      check(h, all);
      EXPECT_EQ(h.rows(), rows);
      EXPECT_EQ(h.mass(), static_cast<double>(rows));
      for (int i = 0; i < dims; ++i)
        for (int j = i + 1; j < dims; ++j) ASSERT_EQ(h.data()[i * dims + j], 0);
    }
}

TEST(Hessian, LongStretchesAreCut) {
  const int dims = 40;
  const int64_t rows = 9000;
  const auto x = random_values(static_cast<size_t>(rows * dims), 2);
  Hessian h(dims);
  const HessianRows all{.x = x.data(), .type = Real::kF32, .rows = rows};
  h.add(all);
  check(h, all);
}

TEST(Hessian, PicksWeighsAndStrides) {
  const int dims = 70, stride = 75;
  const auto x = random_values(size_t{100} * stride, 3);
  const std::vector<int32_t> pick{99, 0, 17, 17, 42};
  const std::vector<float> weight{0.5f, 2, 0, 0.25f, 3};
  const HessianRows rows{.x = x.data(),
                         .type = Real::kF32,
                         .stride = stride,
                         .rows = 5,
                         .pick = pick.data(),
                         .weight = weight.data()};
  Hessian h(dims);
  h.add(rows);
  check(h, rows);
  EXPECT_EQ(h.mass(), 5.75);
}

TEST(Hessian, AllTypesOfInputs) {
  const int dims = 48;
  const auto x = random_values(size_t{64} * dims, 4);
  std::vector<bf16> half;
  std::vector<f16> other;
  std::vector<float> whole;
  for (const float value : x) {
    half.push_back(to_bf16(value));
    whole.push_back(rounded(value));
    other.push_back(to_f16(whole.back()));
  }
  Hessian a(dims), b(dims), c(dims);
  a.add({.x = half.data(), .type = Real::kBf16, .rows = 64});
  b.add({.x = whole.data(), .type = Real::kF32, .rows = 64});
  c.add({.x = other.data(), .type = Real::kF16, .rows = 64});
  for (int i = 0; i < dims * dims; ++i) {
    ASSERT_EQ(a.data()[i], b.data()[i]);
    ASSERT_NEAR(a.data()[i], c.data()[i], 1e-3);  // an f16 has fewer exponents: tiny values lose digits
  }
}

TEST(Hessian, SameBitsForAnyThreadCount) {
  const int dims = 600;
  const auto x = random_values(size_t{300} * dims, 5);
  const HessianRows rows{.x = x.data(), .type = Real::kF32, .rows = 300};
  Hessian alone(dims);
  alone.add(rows);
  Buffer scratch;
  for (const int threads : {1, 2, 3}) {
    Pool pool({.threads = threads, .pin = false});
    Hessian h(dims);
    h.add(pool, rows, &scratch);
    for (int i = 0; i < dims * dims; ++i) ASSERT_EQ(h.data()[i], alone.data()[i]) << threads;
  }
}

TEST(Hessian, SumsScalesAndShrinks) {
  const int dims = 20;
  const auto x = random_values(size_t{30} * dims, 6);
  Hessian few(dims), many(dims), all(dims);
  few.add({.x = x.data(), .type = Real::kF32, .rows = 3});
  many.add({.x = x.data() + 3 * dims, .type = Real::kF32, .rows = 27});
  all.add(1, few);
  all.add(1, many);
  EXPECT_EQ(all.rows(), 30);
  EXPECT_EQ(all.mass(), 30);
  const Hessian mixed = shrunk(few, all, 60);
  EXPECT_EQ(mixed.rows(), 3);
  EXPECT_EQ(mixed.mass(), 63);
  for (int i = 0; i < dims; ++i)
    for (int j = 0; j <= i; ++j) ASSERT_NEAR(mixed.at(i, j), few.at(j, i) + 2 * all.at(i, j), 1e-4);
  const Hessian none = shrunk(few, Hessian(dims), 60);
  EXPECT_EQ(none.at(3, 1), few.at(3, 1));
  const Hessian down = shrunk_to_diagonal(few, 6), alone = diagonal_of(few);
  EXPECT_EQ(down.rows(), 3);
  EXPECT_EQ(alone.mass(), 3);
  for (int i = 0; i < dims; ++i)
    for (int j = 0; j <= i; ++j) {
      ASSERT_NEAR(down.at(i, j), few.at(i, j) * (i == j ? 3 : 1), 1e-5);
      ASSERT_EQ(alone.at(i, j), i == j ? few.at(i, j) : 0);
    }
  EXPECT_EQ(shrunk_to_diagonal(Hessian(dims), 6).mean_diagonal(), 0);
  all.scale(0.5);
  EXPECT_EQ(all.mass(), 15);
}

TEST(Hessian, NamesWhatIsNotFinite) {
  auto x = random_values(size_t{100} * 30, 7);
  x[70 * 30 + 11] = std::numeric_limits<float>::quiet_NaN();
  Hessian h(30);
  const HessianRows rows{.x = x.data(), .type = Real::kF32, .rows = 100};
  try {
    h.add(rows);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    EXPECT_THAT(error.what(), HasSubstr("row 70, column 11"));
  }
  EXPECT_EQ(h.rows(), 0);
  EXPECT_EQ(h.mean_diagonal(), 0);
  const float negative = -1;
  EXPECT_THROW(h.add({.x = x.data(), .type = Real::kF32, .rows = 1, .weight = &negative}), Error);
}

}  // namespace
}  // namespace kt::inline nn
