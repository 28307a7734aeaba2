#include "weights/kt/kt_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/error.h"
#include "formats/floats.h"

namespace kt::inline weights {
namespace {

using testing::HasSubstr;

// Random bf16 values, rows of very different size, some zero.
std::vector<float> random_values(int64_t n, int64_t k, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<size_t>(n * k));
  for (int64_t row = 0; row < n; ++row) {
    const float size = row % 11 == 5 ? 0.0f : std::ldexp(1.0f, static_cast<int>(row % 40) - 30);
    for (int64_t i = 0; i < k; ++i)
      out[static_cast<size_t>(row * k + i)] = to_f32(to_bf16(normal(random) * size));
  }
  return out;
}

struct Packed {
  KtShape shape;
  std::vector<std::byte> bytes;
  std::vector<float> scales;
  WeightError error;
};

Packed pack(int bits, const std::vector<float>& values, int64_t n, int64_t k,
            Rounding rounding = Rounding::kEstablished, int64_t step = 64) {
  Packed out{.shape = kt_shape(bits, n, k), .bytes = {}, .scales = {}, .error = {}};
  out.bytes.assign(out.shape.weight_bytes, std::byte{0xA5});
  out.scales.assign(static_cast<size_t>(out.shape.n_pad), -1.0f);
  for (int64_t row = 0; row < n; row += step) {
    kt_quantise_rows(out.shape, rounding, row, std::min(step, n - row), values.data() + row * k, k, out.bytes,
                     out.scales, out.error, "w");
  }
  return out;
}

// The code at (row, column) by the formulas of the format, one element at a time.
int code_at(const Packed& w, int64_t row, int64_t column) {
  const int64_t n_block = w.shape.bits == 4 ? 128 : 64, granule = n_block;
  const int64_t nb = row / n_block * n_block, nbs = std::min(n_block, w.shape.n_pad - nb);
  const int64_t kb = column / 3584 * 3584, kbs = std::min<int64_t>(3584, w.shape.k_pad - kb);
  const int64_t r = row - nb, n0 = r / 32 * 32, i = r % 32;
  const int64_t c = column - kb, k0 = c / granule * granule, j = c % granule;
  const int64_t element = nb * w.shape.k_pad + kb * nbs + n0 * kbs + k0 * 32;
  const int64_t jj = j % 64, inside = i / 16 * 1024 + jj / 4 * 64 + i % 16 * 4 + jj % 4;
  if (w.shape.bits == 8)
    return static_cast<int8_t>(std::to_integer<uint8_t>(w.bytes.at(static_cast<size_t>(element + inside))));
  const int byte = std::to_integer<int>(w.bytes.at(static_cast<size_t>(element / 2 + inside)));
  const int nibble = j < 64 ? byte & 15 : byte >> 4;
  return nibble >= 8 ? nibble - 16 : nibble;
}

struct Size {
  int64_t n, k;
};
constexpr Size kSizes[] = {{1, 1},    {32, 64},   {32, 128},  {64, 256},  {96, 320},   {160, 384},
                           {37, 100}, {130, 513}, {33, 3584}, {65, 3712}, {200, 7168}, {31, 3585}};

TEST(KtLayout, CodesAndScalesAreThoseOfTheFormatsFloor) {
  for (const int bits : {4, 8}) {
    for (const Size size : kSizes) {
      SCOPED_TRACE(testing::Message() << bits << " bits, " << size.n << " x " << size.k);
      const std::vector<float> values = random_values(size.n, size.k, static_cast<int>(size.n + size.k));
      const Packed got =
          pack(bits, values, size.n, size.k, Rounding::kEstablished, size.n % 3 == 1 ? 12 : 64);
      const Matrix want = quantise(format_named(bits == 4 ? "int4" : "int8"), values, size.n, size.k);
      for (int64_t row = 0; row < got.shape.n_pad; ++row) {
        float scale = 0;
        if (row < size.n) std::memcpy(&scale, want.scales.data() + row * 4, 4);
        ASSERT_EQ(got.scales[static_cast<size_t>(row)] * (bits == 4 ? 16 : 1), scale) << row;
        for (int64_t column = 0; column < got.shape.k_pad; ++column) {
          int code = 0;
          if (row < size.n && column < size.k) {
            const uint8_t stored = want.codes[static_cast<size_t>(row * size.k + column)];
            code = bits == 4 ? stored - 8 : static_cast<int8_t>(stored);
          }
          ASSERT_EQ(code_at(got, row, column), code) << row << ", " << column;
        }
      }
    }
  }
}

TEST(KtLayout, UnpacksAnyRows) {
  for (const int bits : {4, 8}) {
    for (const Size size : kSizes) {
      const std::vector<float> values = random_values(size.n, size.k, 7);
      const Packed w = pack(bits, values, size.n, size.k);
      std::mt19937 random(3);
      for (int round = 0; round < 6; ++round) {
        const int64_t first = round == 0 ? 0 : static_cast<int64_t>(random() % static_cast<unsigned>(size.n));
        const int64_t most = size.n - first;
        const int64_t count =
            round == 0 ? size.n : 1 + static_cast<int64_t>(random() % static_cast<unsigned>(most));
        const int64_t stride = size.k + 3;
        std::vector<uint8_t> out(static_cast<size_t>(count * stride), 0xEE);
        kt_unpack_rows(w.shape, w.bytes, first, count, out.data(), stride);
        for (int64_t row = 0; row < count; ++row) {
          for (int64_t column = 0; column < stride; ++column) {
            const uint8_t got = out[static_cast<size_t>(row * stride + column)];
            if (column >= size.k) {
              ASSERT_EQ(got, 0xEE) << "past the row";
              continue;
            }
            const int code = code_at(w, first + row, column);
            ASSERT_EQ(got, static_cast<uint8_t>(bits == 4 ? code + 8 : code))
                << first + row << ", " << column;
          }
        }
      }
    }
  }
}

TEST(KtLayout, EstablishedSizes) {
  const KtShape gate = kt_shape(4, 1024, 7168), down = kt_shape(4, 7168, 1024);
  EXPECT_EQ(gate.weight_bytes, 3670016u);
  EXPECT_EQ(gate.scale_bytes, 4096u);
  EXPECT_EQ(down.scale_bytes, 28672u);
  EXPECT_FALSE(gate.padded());
  EXPECT_TRUE(kt_shape(4, 32, 64).padded());
  EXPECT_FALSE(kt_shape(8, 32, 64).padded());
  EXPECT_THROW(kt_shape(3, 32, 64), Error);
  EXPECT_THROW(kt_shape(4, 0, 64), Error);
  EXPECT_THROW(kt_shape(8, int64_t{1} << 40, int64_t{1} << 40), Error);
}

// A part of down is a column slice read through the stride of whole rows.
TEST(KtLayout, StrideTakesASliceOfColumns) {
  const int64_t n = 64, k = 256, part = 128;
  const std::vector<float> values = random_values(n, k, 11);
  std::vector<float> slice;
  for (int64_t row = 0; row < n; ++row)
    slice.insert(slice.end(), values.begin() + row * k + part, values.begin() + row * k + 2 * part);
  const Packed want = pack(4, slice, n, part);
  Packed got{.shape = kt_shape(4, n, part), .bytes = {}, .scales = {}, .error = {}};
  got.bytes.resize(got.shape.weight_bytes);
  got.scales.resize(static_cast<size_t>(n));
  kt_quantise_rows(got.shape, Rounding::kEstablished, 0, n, values.data() + part, k, got.bytes, got.scales,
                   got.error, "w");
  EXPECT_EQ(got.bytes, want.bytes);
  EXPECT_EQ(got.scales, want.scales);
}

TEST(KtLayout, ErrorIsWhatRoundingLost) {
  const int64_t n = 40, k = 200;
  const std::vector<float> values = random_values(n, k, 5);
  for (const int bits : {4, 8}) {
    for (const Rounding rounding : {Rounding::kEstablished, Rounding::kDirect}) {
      const Packed w = pack(bits, values, n, k, rounding);
      WeightError want{};
      for (int64_t row = 0; row < n; ++row) {
        for (int64_t i = 0; i < k; ++i) {
          const double value = static_cast<double>(values[static_cast<size_t>(row * k + i)]);
          const double stored = code_at(w, row, i) * (bits == 4 ? 16.0 : 1.0) *
                                static_cast<double>(w.scales[static_cast<size_t>(row)]);
          want.add({value * value, (stored - value) * (stored - value), std::fabs(stored - value), 1});
        }
      }
      // Sums in f32 lanes of 50 terms and one rounding of each scaled value (2^-24 of 127 against noise of
      // about a quarter step): well under 1e-3.
      EXPECT_NEAR(w.error.noise / want.noise, 1, 1e-3);
      EXPECT_NEAR(w.error.signal / want.signal, 1, 1e-5);
      EXPECT_NEAR(w.error.largest / want.largest, 1, 1e-3);
      EXPECT_EQ(w.error.weights, n * k);
    }
  }
}

TEST(KtLayout, DirectRoundingIsCloserAndInTheSameRange) {
  const int64_t n = 32, k = 512;
  const std::vector<float> values = random_values(n, k, 9);
  const Packed twice = pack(4, values, n, k), once = pack(4, values, n, k, Rounding::kDirect);
  EXPECT_LT(once.error.noise, twice.error.noise);
  EXPECT_EQ(once.scales, twice.scales);
  for (int64_t row = 0; row < n; ++row) {
    float amax = 0;
    for (int64_t i = 0; i < k; ++i)
      amax = std::max(amax, std::fabs(values[static_cast<size_t>(row * k + i)]));
    for (int64_t i = 0; amax > 0 && i < k; ++i) {
      const float value = values[static_cast<size_t>(row * k + i)];
      ASSERT_EQ(code_at(once, row, i), static_cast<int>(std::nearbyint(value * (7 / amax))));
    }
  }
}

// Denormal scales whose reciprocal overflows, and rows too small for any scale: codes stay in range, nothing
// is NaN, and where the formats floor has an answer it is the same one.
TEST(KtLayout, TinyRows) {
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();
  const int64_t n = 8, k = 128;
  std::vector<float> values(n * k);
  const float sizes[n] = {kLeast, kLeast * 60, kLeast * 190, kLeast * 5000, 1e-40f, 1e-38f, 3e-37f, 1e-30f};
  std::mt19937 random(1);
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t i = 0; i < k; ++i)
      values[static_cast<size_t>(row * k + i)] =
          sizes[row] * (static_cast<float>(random() % 2001) / 1000 - 1);
    values[static_cast<size_t>(row * k)] = -sizes[row];
  }
  for (const int bits : {4, 8}) {
    const Packed got = pack(bits, values, n, k);
    const Matrix want = quantise(format_named(bits == 4 ? "int4" : "int8"), values, n, k);
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t i = 0; i < k; ++i) {
        const uint8_t stored = want.codes[static_cast<size_t>(row * k + i)];
        ASSERT_EQ(code_at(got, row, i), bits == 4 ? stored - 8 : static_cast<int8_t>(stored))
            << bits << " bits, row " << row;
      }
    }
    EXPECT_TRUE(std::isfinite(got.error.noise));
    const Packed direct = pack(bits, values, n, k, Rounding::kDirect);
    for (int64_t row = 0; row < n; ++row)
      for (int64_t i = 0; i < k; ++i) ASSERT_LE(std::abs(code_at(direct, row, i)), bits == 4 ? 7 : 127);
  }
}

TEST(KtLayout, RefusesValuesThatAreNotNumbers) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(),
                          -std::numeric_limits<float>::infinity()}) {
    std::vector<float> values(40 * 70, 1.0f);
    values[37 * 70 + 69] = bad;
    try {
      pack(8, values, 40, 70, Rounding::kEstablished, 32);
      FAIL() << "accepted";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("w: row 37, column 69 is not a finite number"));
    }
  }
  std::vector<float> values(32 * 64, 1.0f);
  values[5] = std::numeric_limits<float>::max();
  EXPECT_THROW(pack(8, values, 32, 64), Error);
}

}  // namespace
}  // namespace kt::inline weights
