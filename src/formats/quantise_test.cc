#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "formats/floats.h"
#include "formats/known_formats.h"
#include "formats/matrix.h"

namespace kt::inline formats {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

float f32_at(const std::vector<uint8_t>& bytes, size_t index) {
  float value;
  std::memcpy(&value, bytes.data() + 4 * index, 4);
  return value;
}

uint16_t u16_at(const std::vector<uint8_t>& bytes, size_t index) {
  return static_cast<uint16_t>(bytes[2 * index] | bytes[2 * index + 1] << 8);
}

TEST(Quantise, Int8ByHand) {
  const std::vector<float> values = {127, -127, 0.5f, 1.5f, -2.5f, 63.4f};
  const Matrix w = quantise(format_named("int8"), values, 1, 6);
  EXPECT_EQ(f32_at(w.scales, 0), 127 * (1.0f / 127));
  EXPECT_THAT(w.codes, ElementsAre(127, 0x81, 0, 2, 0xFE, 63));
}

TEST(Quantise, Int4RoundsInTwoSteps) {
  // amax 112: d = 1, the stored scale is 16. 7.5 -> 8 -> 16 -> 1; 7.4 -> 7 -> 0; -24 -> -32 -> -2; 23 -> 16
  // -> 1.
  const std::vector<float> values = {112, 7.5f, 7.4f, -24, 23, -112, 0};
  const Matrix w = quantise(format_named("int4"), values, 1, 7);
  EXPECT_EQ(f32_at(w.scales, 0), 16.0f);
  EXPECT_THAT(w.codes, ElementsAre(15, 9, 8, 6, 9, 1, 8));
}

TEST(Quantise, SymmetricGroupsByHand) {
  // absmax 7.5: scale 1; 7.5 -> 8, clamped to 7; -7.5 -> -8; 0.5 and 2.5 to even.
  const std::vector<float> values = {7.5f, -7.5f, 0.5f, 2.5f, -1};
  const Matrix w = quantise(format_named("int4_g32"), values, 1, 5);
  EXPECT_EQ(u16_at(w.scales, 0), to_bf16(1.0f).bits);
  EXPECT_THAT(w.codes, ElementsAre(15, 0, 8, 10, 7));
}

TEST(Quantise, ZeroPointsByHand) {
  // -5 to 10: scale 1, zero 5.
  const std::vector<float> values = {-5, 10, 0, 2.5f};
  const Matrix w = quantise(format_named("int4_g32_zero"), values, 1, 4);
  EXPECT_EQ(u16_at(w.scales, 0), to_f16(1.0f).bits);
  EXPECT_THAT(w.mins, ElementsAre(5));
  EXPECT_THAT(w.codes, ElementsAre(0, 15, 5, 7));
  // All above zero: the range is stretched down to zero.
  const std::vector<float> above = {15, 30};
  const Matrix stretched = quantise(format_named("int4_g32_zero"), above, 1, 2);
  EXPECT_THAT(stretched.mins, ElementsAre(0));
  EXPECT_EQ(value_at(stretched.view(), 0, 0), 16.0f);
  EXPECT_EQ(value_at(stretched.view(), 0, 1), 30.0f);
}

TEST(Quantise, Fp8BlocksShareAScaleAcrossRows) {
  std::vector<float> values(129 * 129, 1.0f);
  values[5] = 448;
  values[128 * 129 + 128] = 896;
  const Matrix w = quantise(format_named("fp8"), values, 129, 129);
  EXPECT_EQ(f32_at(w.scales, 0), 1.0f);
  EXPECT_EQ(f32_at(w.scales, 3), 2.0f);
  EXPECT_EQ(w.codes[127 * 129 + 127], 0x38);
  EXPECT_EQ(w.codes[128 * 129 + 128], 0x7E);
}

TEST(Quantise, PowersOfTwoByHand) {
  const std::vector<float> seven = {7, 5, -0.25f, 0.75f};  // scale 1: 7 ties to 6's even side, 5 to 4
  const Matrix w = quantise(format_named("mxfp4"), seven, 1, 4);
  EXPECT_THAT(w.scales, ElementsAre(127));
  EXPECT_THAT(w.codes, ElementsAre(7, 6, 8, 2));
  const std::vector<float> above = {7.001f};
  EXPECT_THAT(quantise(format_named("mxfp4"), above, 1, 1).scales, ElementsAre(128));
}

TEST(Quantise, TheExtremeLandsOnTheLowestCode) {
  std::vector<float> values(256, 0.25f);
  values[3] = 8;
  const Matrix w = quantise(format_named("q4_0"), values, 1, 32 * 8);
  EXPECT_EQ(w.codes[3], 0);
  EXPECT_EQ(value_at(w.view(), 0, 3), 8.0f);
  for (const char* name : {"q3_k", "q6_k", "iq4_xs"}) {
    const Matrix super = quantise(format_named(name), values, 1, 256);
    EXPECT_NEAR(value_at(super.view(), 0, 3), 8.0f, 8.0f / 1024) << name;  // f16 rounding of the factor
  }
}

// Range of the values that share a scale with (row, column): `step` columns wide, span.n rows high.
struct Range {
  double lowest = 0, highest = 0, amax = 0;
};

Range range_around(const std::vector<float>& values, int64_t n, int64_t k, int64_t row, int64_t column,
                   int64_t step, int64_t rows) {
  const int64_t r0 = row / rows * rows, c0 = column / step * step;
  Range range{1e300, -1e300, 0};
  for (int64_t r = r0; r < std::min(n, r0 + rows); ++r) {
    for (int64_t c = c0; c < std::min(k, c0 + step); ++c) {
      const double value = values[r * k + c];
      range = {std::min(range.lowest, value), std::max(range.highest, value),
               std::max(range.amax, std::fabs(value))};
    }
  }
  return range;
}

// 2^-11 and 2^-25: half a step of an f16, relative, and absolute among its denormals.
constexpr double kHalf = 1.0 / 2048, kTiny = 1.0 / (1 << 25);

// An upper bound of |w - dequantised| from the inputs alone. A scale s stored with error ds moves the largest
// code, top steps from zero, by top * ds; the rest is half a step, or a whole one where the codes reach one
// further down than up. Terms of second order are covered by the factor at the end.
double bound(const Format& f, double w, const Range& span, const Range& super, double deepest,
             double widest) {
  const double magnitude = std::fabs(w);
  const double top = is_integer(f.code) && f.code != Code::kI8 ? (1 << code_bits(f.code)) - 1 : 127;
  double out = 0;
  switch (f.code) {
    case Code::kF32:
      return 0;
    case Code::kBf16:
      return magnitude / 256 + std::ldexp(1, -134);
    case Code::kF16:
      return magnitude * kHalf + kTiny;
    case Code::kE4m3: {
      const double s =
          f.scale == Scale::kE8m0 ? std::max(2 * span.amax / 464, std::ldexp(1, -127)) : span.amax / 448;
      // Relative half step 2^-4; 2^-10 of the scale among denormals; f32 scales may be denormal themselves.
      out = std::max(magnitude / 16, s / 1024) + 448 * std::ldexp(1, -150);
      break;
    }
    case Code::kE2m1:
      if (f.scale == Scale::kE4m3) {
        // The scale is rounded too: to a 16th of it, which the largest number may exceed, or to a multiple of 2^-9.
        out = std::max(magnitude, span.amax / 6 + std::ldexp(1, -9)) / 4 + span.amax / 16 +
              6 * std::ldexp(1, -10);
        break;
      }
      out = std::max(magnitude, std::max(2 * span.amax / 7, std::ldexp(1, -127))) / 4;
      break;
    default:
      break;
  }
  if (f.scale == Scale::kF32 && f.code == Code::kI8) out = span.amax / 254 + 127 * std::ldexp(1, -149);
  // Two roundings: half of an eight-bit step, then eight of them; 112 to amax.
  if (f.scale == Scale::kF32 && f.code == Code::kU4) out = span.amax * 8.5 / 112 + 112 * std::ldexp(1, -149);
  if (f.scale == Scale::kBf16) out = span.amax / 7.5 * (0.5 + 7.5 / 256) + 8 * std::ldexp(1, -133);
  if (f.scale == Scale::kF16) {
    const double lowest = f.min == Min::kZero ? std::min(0.0, span.lowest) : span.lowest;
    const double highest = f.min == Min::kZero ? std::max(0.0, span.highest) : span.highest;
    if (f.min != Min::kNone) {
      const double s = (highest - lowest) / top;
      out = s * (0.5 + top * kHalf) + top * kTiny;
      if (f.min == Min::kF16) out += std::fabs(lowest) * kHalf + kTiny;
    } else if (f.code == Code::kI8) {
      out = span.amax / 127 * (0.5 + 127 * kHalf) + 127 * kTiny;
    } else {
      const double reach = f.code == Code::kIq4 ? 127 : f.bias;  // -127 to 113: 14 are missing at the top
      const double missing = f.code == Code::kIq4 ? 14 : 1;
      out = span.amax / reach * (missing + reach * kHalf) + reach * kTiny;
    }
  }
  if (f.scale == Scale::kS8F16) {
    const double levels = 1 << span_scale_bits(f.code);
    if (f.min == Min::kS8F16) {
      const double s = (span.highest - std::min(0.0, span.lowest)) / top;
      const double ds = widest / top / (levels - 1) * 0.5 + widest / top * kHalf + levels * kTiny;
      const double dmin = deepest / (levels - 1) * 0.5 + deepest * kHalf + levels * kTiny;
      out = (s + ds) / 2 + top * ds + dmin;
    } else {
      const double reach = f.code == Code::kIq4 ? 127 : f.bias, missing = f.code == Code::kIq4 ? 14 : 1;
      // The integers, too, reach one further down than up.
      const double ds = super.amax / reach * (1 / (levels / 2) + kHalf) + levels * kTiny;
      out = (span.amax / reach + ds) * missing + reach * ds;
    }
  }
  return out * (1 + 1.0 / 128);
}

void check_bounds(const NamedFormat& entry, const std::vector<float>& values, int64_t n, int64_t k,
                  const char* what) {
  const Format& f = entry.format;
  const Matrix w = quantise(f, values, n, k);
  EXPECT_EQ(error_of([&] { check_finite(w.view(), "w"); }), "no error") << entry.name << " " << what;
  const int64_t step = f.span.k ? f.span.k : k, super_step = f.span.super_k ? f.span.super_k : step;
  Range span, super;
  double deepest = 0, widest = 0;
  for (int64_t i = 0; i < n * k; ++i) {
    const int64_t row = i / k, column = i % k;
    if (column % step == 0) span = range_around(values, n, k, row, column, step, f.span.n);
    if (column % super_step == 0 && f.span.super_k) {
      super = range_around(values, n, k, row, column, super_step, 1);
      deepest = widest = 0;
      for (int64_t c = column; c < column + super_step; c += step) {
        const Range part = range_around(values, n, k, row, c, step, 1);
        deepest = std::max(deepest, -part.lowest);
        widest = std::max(widest, part.highest - std::min(0.0, part.lowest));
      }
    }
    const double error = std::fabs(static_cast<double>(values[i]) - value_at(w.view(), row, column));
    ASSERT_LE(error, bound(f, values[i], span, super, deepest, widest))
        << entry.name << ", " << what << ", row " << row << ", column " << column << ", value " << values[i];
  }
}

TEST(Quantise, ErrorsStayWithinTheirBounds) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const NamedFormat& entry : rounded_formats()) {
    const int64_t n = entry.format.span.n > 1 ? 131 : 5, k = entry.format.span.super_k ? 512 : 197;
    const bool f16_inside = entry.format.scale == Scale::kF16 || entry.format.scale == Scale::kS8F16 ||
                            entry.format.code == Code::kF16;
    const float huge = entry.format.scale == Scale::kE4m3   ? 2.6e3f
                       : f16_inside                         ? 3e4f
                       : entry.format.scale == Scale::kNone ? 3e38f
                                                            : 1.7e38f;
    const auto fill = [&](const std::function<float(int64_t)>& value) {
      std::vector<float> values(n * k);
      for (int64_t i = 0; i < n * k; ++i) values[i] = value(i);
      return values;
    };
    const auto gauss = [&](int64_t) { return normal(random); };
    check_bounds(entry, fill(gauss), n, k, "gaussian");
    check_bounds(entry, fill([&](int64_t) { return 0.02f * normal(random) + 0.05f; }), n, k, "shifted");
    check_bounds(entry, fill([&](int64_t) { return -3 - 0.5f * std::fabs(normal(random)); }), n, k,
                 "negative");
    check_bounds(entry, fill([&](int64_t i) { return i / k % 2 ? 0.37f : -1.3f; }), n, k, "equal rows");
    check_bounds(entry, fill([&](int64_t i) { return i % 41 ? 0.001f * normal(random) : 9.0f; }), n, k,
                 "outliers");
    check_bounds(entry, fill([&](int64_t i) { return i / k % 2 ? normal(random) : 0; }), n, k,
                 "some zero rows");
    check_bounds(entry, fill([&](int64_t) { return std::clamp(normal(random), -1.0f, 1.0f) * huge; }), n, k,
                 "huge");
    check_bounds(entry, fill([&](int64_t) { return 1e-7f * normal(random); }), n, k, "tiny");
    check_bounds(entry, fill([&](int64_t) { return 1e-38f * normal(random); }), n, k, "smallest normals");
    check_bounds(entry, fill([&](int64_t) { return 1e-41f * normal(random); }), n, k, "denormal");
    check_bounds(entry, fill([&](int64_t) { return random() % 2 ? 1e-45f : 0.0f; }), n, k,
                 "smallest denormals");
  }
}

TEST(Quantise, ZerosComeBackAsZeros) {
  for (const NamedFormat& entry : rounded_formats()) {
    const int64_t n = 130, k = entry.format.span.super_k ? 512 : 131;
    const std::vector<float> zeros(n * k, 0.0f);
    const Matrix w = quantise(entry.format, zeros, n, k);
    std::vector<float> out(n * k, 1.0f);
    dequantise(w.view(), out);
    for (const float value : out) ASSERT_EQ(std::bit_cast<uint32_t>(value), 0u) << entry.name;
  }
}

TEST(Quantise, ShortAndSingleShapes) {
  for (const NamedFormat& entry : rounded_formats()) {
    const int64_t k = entry.format.span.super_k ? entry.format.span.super_k : 1;
    const std::vector<float> values(k, 1.0f);
    const Matrix w = quantise(entry.format, values, 1, k);
    EXPECT_NEAR(value_at(w.view(), 0, 0), 1.0f, 0.15f) << entry.name;
  }
}

TEST(Quantise, MakesNoGrids) {
  const std::vector<float> values(256, 1.0f);
  int grids = 0;
  for (const NamedFormat& entry : kFormats) {
    if (!is_grid(entry.format.code)) continue;
    ++grids;
    EXPECT_THAT(error_of([&] { quantise(entry.format, values, 1, 256); }),
                AllOf(HasSubstr(std::string(entry.name)), HasSubstr("not rounded to it")));
  }
  EXPECT_EQ(grids, 7);
}

TEST(Quantise, RefusesWhatCannotBeStored) {
  const std::vector<float> bad = {1, 2, 3, std::nanf(""), 5, 6};
  EXPECT_THAT(error_of([&] { quantise(format_named("int8"), bad, 2, 3); }), HasSubstr("row 1, column 0"));
  EXPECT_THAT(error_of([&] { quantise(format_named("int8"), bad, 2, 4); }),
              AllOf(HasSubstr("expected 8"), HasSubstr("got 6")));
  std::vector<float> huge(512, 1.0f);
  huge[300] = 3e38f;
  for (const char* name : {"mxfp4", "int8", "fp8", "q4_1", "q2_k", "iq4_xs", "int4_g128_zero", "fp16"}) {
    EXPECT_THAT(error_of([&] { quantise(format_named(name), huge, 1, 512); }),
                AllOf(HasSubstr(name), HasSubstr("row 0")))
        << name;
  }
  huge[300] = 1.6e38f;
  EXPECT_THAT(error_of([&] { quantise(format_named("q4_0"), huge, 1, 512); }),
              AllOf(HasSubstr("row 0, columns 288 to 319"), HasSubstr("q4_0"), HasSubstr("cannot store")));
  huge[300] = std::bit_cast<float>(0x7F7FFFFFu);
  EXPECT_THAT(error_of([&] { quantise(format_named("bf16"), huge, 1, 512); }), HasSubstr("column 300"));
}

}  // namespace
}  // namespace kt::inline formats
