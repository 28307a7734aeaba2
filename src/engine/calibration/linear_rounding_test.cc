#include "engine/calibration/linear_rounding.h"

#include <gtest/gtest.h>

#include <random>

#include "formats/floats.h"

namespace kt::inline engine {
namespace {

constexpr int64_t kN = 150, kK = 96, kStride = 100, kRows = 600;
constexpr PackedSpec kLinearSpec{.bits = 4, .group = 32};

struct FloatRows : StoredMatrix {
  explicit FloatRows(const std::vector<float>& values)
      : whole(quantise(format_named("bf16"), values, kN, kK)) {
    name = "projection";
    format = whole.format;
    n = kN;
    k = kK;
  }
  Matrix rows(int64_t first, int64_t count) const override {
    Matrix out(format, count, k);
    std::copy_n(whole.codes.data() + first * k * 2, out.codes.size(), out.codes.data());
    return out;
  }
  Matrix whole;
};

class LinearRounding : public testing::Test {
 protected:
  // Inputs with few directions: what calibration can make use of.
  LinearRounding() : x_(kRows * kStride), weights_(kN * kK) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> directions(8 * kK);
    for (float& d : directions) d = normal(random);
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t d = 0; d < 8; ++d) {
        const float much = normal(random);
        for (int64_t c = 0; c < kK; ++c)
          x_[static_cast<size_t>(r * kStride + c)] += much * directions[static_cast<size_t>(d * kK + c)];
      }
    for (float& x : x_) x += 0.1f * normal(random);
    for (float& w : weights_) w = to_f32(to_bf16(normal(random)));
    for (int32_t r = 0; r < kRows; ++r) (r % 8 == 7 ? held_out_ : train_).push_back(r);
  }

  RoundedLinear round(int threads, std::span<const int32_t> train, std::span<const int32_t> held_out) const {
    LinearRounder rounder(std::make_shared<Pool>(PoolOptions{.threads = threads, .nodes = 1, .pin = false}),
                          kK, {});
    rounder.add(x_.data(), kStride, train, held_out);
    rounder.add(x_.data(), kStride, {}, {});
    return rounder.round(FloatRows(weights_), kLinearSpec);
  }

  std::vector<float> x_, weights_;
  std::vector<int32_t> train_, held_out_;
};

TEST_F(LinearRounding, IsBetterThanToNearestAndTheSameOnAnyThreads) {
  const RoundedLinear one = round(1, train_, held_out_), three = round(3, train_, held_out_);
  EXPECT_EQ(one.matrix.codes, three.matrix.codes);
  EXPECT_EQ(one.matrix.scales, three.matrix.scales);
  EXPECT_EQ(one.figures.by, RoundedBy::kGptq);
  EXPECT_EQ(one.figures.tokens, std::ssize(train_));
  EXPECT_EQ(one.figures.held_out, std::ssize(held_out_));
  EXPECT_LT(one.figures.error, 0.5 * one.figures.rtn_error);
  // Figures are those of the rows held out, in bf16: a percent.
  std::vector<float> values(weights_.size());
  dequantise(one.matrix.view(), values);
  double error = 0, signal = 0;
  for (const int32_t row : held_out_)
    for (int64_t r = 0; r < kN; ++r) {
      double y = 0, off = 0;
      for (int64_t c = 0; c < kK; ++c) {
        const double x = x_[static_cast<size_t>(row * kStride + c)];
        const auto at = static_cast<size_t>(r * kK + c);
        y += x * double{weights_[at]};
        off += x * (double{values[at]} - double{weights_[at]});
      }
      signal += y * y;
      error += off * off;
    }
  EXPECT_NEAR(one.figures.signal / signal, 1, 0.01);
  EXPECT_NEAR(one.figures.error / error, 1, 0.01);
}

TEST_F(LinearRounding, WithoutTokensToNearest) {
  const Matrix nearest = round_packed(kLinearSpec, kN, kK, weights_.data(), "w");
  const std::span<const int32_t> few = std::span(train_).first(20);
  const RoundedLinear none = round(1, {}, {}), some = round(1, few, held_out_),
                      untried = round(1, train_, {});
  EXPECT_EQ(none.figures.by, RoundedBy::kNoTokens);
  EXPECT_EQ(some.figures.by, RoundedBy::kFewTokens);
  EXPECT_EQ(untried.figures.by, RoundedBy::kFewTokens);
  EXPECT_EQ(some.figures.error, some.figures.rtn_error);
  EXPECT_GT(some.figures.error, 0);
  for (const RoundedLinear* each : {&none, &some, &untried}) EXPECT_EQ(each->matrix.codes, nearest.codes);
}

TEST_F(LinearRounding, InputsOfZeroToNearest) {
  std::fill(x_.begin(), x_.end(), 0.0f);
  EXPECT_EQ(round(1, train_, held_out_).figures.by, RoundedBy::kSingular);
}

}  // namespace
}  // namespace kt::inline engine
