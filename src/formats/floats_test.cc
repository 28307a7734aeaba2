#include "formats/floats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace kt::inline formats {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

// sign, exponent and fraction spelt out with ldexp: the reference for every widening.
float spelt_out(uint32_t code, int exponent_bits, int mantissa, int bias) {
  const uint32_t fraction = code & ((1u << mantissa) - 1);
  const uint32_t exponent = (code >> mantissa) & ((1u << exponent_bits) - 1);
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa)
                    : std::ldexp((1u << mantissa) + fraction, static_cast<int>(exponent) - bias - mantissa);
  const bool negative = (code >> (exponent_bits + mantissa)) & 1;
  return static_cast<float>(negative ? -magnitude : magnitude);
}

// The nearest of a sorted list of magnitudes, ties to the even index: the reference for every narrowing.
uint32_t nearest(const std::vector<double>& magnitudes, double value) {
  const auto above = std::upper_bound(magnitudes.begin(), magnitudes.end(), value);
  const auto best = static_cast<uint32_t>(above - magnitudes.begin()) - 1;
  if (above == magnitudes.end()) return best;
  const double to_low = value - magnitudes[best], to_high = *above - value;
  return to_high < to_low || (to_high == to_low && best % 2 == 1) ? best + 1 : best;
}

// All magnitudes of f16, and what overflow rounds against, the number code 0x7C00 would be.
std::vector<double> f16_magnitudes() {
  std::vector<double> magnitudes;
  for (uint32_t code = 0; code < 0x7C00; ++code) magnitudes.push_back(spelt_out(code, 5, 10, 15));
  magnitudes.push_back(65536);
  return magnitudes;
}

// Around every magnitude and every midpoint of neighbours: the value itself, and one f32 step to either side.
template <class Check>
void near_every_boundary(const std::vector<double>& magnitudes, Check check) {
  for (size_t i = 0; i + 1 < magnitudes.size(); ++i) {
    for (const double centre : {magnitudes[i], (magnitudes[i] + magnitudes[i + 1]) / 2}) {
      const auto value = static_cast<float>(centre);
      ASSERT_EQ(value, centre) << "the midpoints of narrow numbers are exact in f32";
      check(value);
      check(std::nextafter(value, kInf));
      if (value > 0) check(std::nextafter(value, 0.0f));
    }
  }
}

TEST(Bf16, WidensAndNarrowsEveryCode) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const float value = to_f32(bf16{static_cast<uint16_t>(code)});
    EXPECT_EQ(bits_of(value), code << 16);
    const uint32_t expected = std::isnan(value) ? code | 0x40 : code;
    EXPECT_EQ(to_bf16(value).bits, expected);
  }
}

TEST(Bf16, RoundsHalfEvenAroundEveryBoundary) {
  for (uint32_t code = 0; code < 0x7F80; ++code) {
    const uint32_t low = code << 16, half = low | 0x8000;
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const auto narrow = [&](uint32_t bits) { return to_bf16(std::bit_cast<float>(bits | sign)).bits; };
      const uint32_t s = sign >> 16;
      EXPECT_EQ(narrow(low + 1), code | s);
      EXPECT_EQ(narrow(half - 1), code | s);
      EXPECT_EQ(narrow(half), (code + (code & 1)) | s);
      EXPECT_EQ(narrow(half + 1), (code + 1) | s);
    }
  }
}

TEST(F16, WidensEveryCode) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const float value = to_f32(f16{static_cast<uint16_t>(code)});
    if ((code & 0x7FFF) > 0x7C00) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_EQ(std::signbit(value), code >> 15 != 0);
    } else if ((code & 0x7FFF) == 0x7C00) {
      EXPECT_EQ(value, code >> 15 ? -kInf : kInf);
    } else {
      EXPECT_EQ(bits_of(value), bits_of(spelt_out(code, 5, 10, 15)));
    }
    const uint32_t expected = std::isnan(value) ? code | 0x200 : code;
    EXPECT_EQ(to_f16(value).bits, expected);
  }
}

TEST(F16, NarrowsToTheNearestAroundEveryBoundary) {
  const std::vector<double> magnitudes = f16_magnitudes();
  near_every_boundary(magnitudes, [&](float value) {
    ASSERT_EQ(to_f16(value).bits, nearest(magnitudes, value)) << value;
    ASSERT_EQ(to_f16(-value).bits, nearest(magnitudes, value) | 0x8000) << value;
  });
}

TEST(F16, NarrowsRandomBitsToTheNearest) {
  const std::vector<double> magnitudes = f16_magnitudes();
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    // Exponents from below the smallest denormal to above the largest number.
    const uint32_t bits = ((98 + random() % 50) << 23) | (random() & 0x7FFFFF);
    const auto value = std::bit_cast<float>(bits);
    ASSERT_EQ(to_f16(value).bits, nearest(magnitudes, value)) << value;
  }
}

TEST(F16, Extremes) {
  EXPECT_EQ(to_f16(65519.996f).bits, 0x7BFF);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7C00);
  EXPECT_EQ(to_f16(std::numeric_limits<float>::max()).bits, 0x7C00);
  EXPECT_EQ(to_f16(-kInf).bits, 0xFC00);
  EXPECT_EQ(to_f16(std::numeric_limits<float>::denorm_min()).bits, 0);
  EXPECT_EQ(to_f16(-0.0f).bits, 0x8000);
  EXPECT_EQ(to_f16(std::ldexp(1.0f, -25)).bits, 0) << "a tie with zero goes to even";
  EXPECT_EQ(to_f16(std::nextafter(std::ldexp(1.0f, -25), 1.0f)).bits, 1);
  EXPECT_TRUE(std::isnan(to_f32(to_f16(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(E4m3, WidensEveryCode) {
  for (uint32_t code = 0; code < 256; ++code) {
    const float value = e4m3_to_f32(static_cast<uint8_t>(code));
    if ((code & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(value));
    } else {
      EXPECT_EQ(bits_of(value), bits_of(spelt_out(code, 4, 3, 7)));
    }
    EXPECT_EQ(to_e4m3(value), code);
  }
  EXPECT_EQ(e4m3_to_f32(0x7E), kE4m3Max);
  EXPECT_EQ(e4m3_to_f32(0x01), std::ldexp(1.0f, -9));
}

TEST(E4m3, NarrowsToTheNearestAndSaturates) {
  std::vector<double> magnitudes;
  for (uint32_t code = 0; code < 0x7F; ++code) magnitudes.push_back(spelt_out(code, 4, 3, 7));
  near_every_boundary(magnitudes, [&](float value) {
    ASSERT_EQ(to_e4m3(value), nearest(magnitudes, value)) << value;
    ASSERT_EQ(to_e4m3(-value), nearest(magnitudes, value) | 0x80) << value;
  });
  for (const float value : {448.0f, 449.0f, 464.0f, 465.0f, 480.0f, 1e30f, kInf}) {
    EXPECT_EQ(to_e4m3(value), 0x7E);
    EXPECT_EQ(to_e4m3(-value), 0xFE);
  }
  EXPECT_EQ(to_e4m3(1e-40f), 0);
}

TEST(E2m1, KnownValuesAndNearest) {
  const std::vector<double> magnitudes = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (uint32_t code = 0; code < 8; ++code) {
    EXPECT_EQ(e2m1_to_f32(static_cast<uint8_t>(code)), magnitudes[code]);
    EXPECT_EQ(bits_of(e2m1_to_f32(static_cast<uint8_t>(code | 8))),
              bits_of(static_cast<float>(-magnitudes[code])));
    EXPECT_EQ(to_e2m1(static_cast<float>(magnitudes[code])), code);
  }
  near_every_boundary(magnitudes, [&](float value) {
    ASSERT_EQ(to_e2m1(value), nearest(magnitudes, value)) << value;
    ASSERT_EQ(to_e2m1(-value), nearest(magnitudes, value) | 8) << value;
  });
  EXPECT_EQ(to_e2m1(100.0f), 7);
  EXPECT_EQ(to_e2m1(-kInf), 15);
}

TEST(E8m0, EveryCode) {
  for (int code = 0; code < 255; ++code) {
    EXPECT_EQ(e8m0_to_f32(static_cast<uint8_t>(code)), std::ldexp(1.0, code - 127));
  }
  EXPECT_TRUE(std::isnan(e8m0_to_f32(255)));
}

TEST(E8m0, ChoosesTheSmallestScaleThatHolds) {
  std::mt19937 random(2);
  for (const float limit : {kE2m1Limit, kE4m3Limit, 1.0f, 6.0f}) {
    const auto check = [&](float amax) {
      int expected = 0;
      while (expected < 254 && amax > static_cast<double>(limit) * std::ldexp(1.0, expected - 127))
        ++expected;
      ASSERT_EQ(e8m0_for(amax, limit), expected) << amax << " " << limit;
    };
    for (int exponent = -149; exponent < 128; ++exponent) {
      const float power = std::ldexp(1.0f, exponent);
      for (const float factor : {1.0f, 1.5f, 1.75f, 1.8125f, 1.9999999f}) check(power * factor);
    }
    for (int i = 0; i < 20000; ++i) check(std::bit_cast<float>(static_cast<uint32_t>(random() % 0x7F800000)));
    check(0.0f);
    check(std::numeric_limits<float>::max());
  }
}

TEST(RoundHalfEven, AgreesWithNearbyint) {
  for (int i = -4000; i <= 4000; ++i) {
    const float value = static_cast<float>(i) / 8;
    EXPECT_EQ(round_half_even(value), std::nearbyint(value));
  }
}

static_assert(to_f32(to_f16(1.0f)) == 1.0f && to_bf16(1.0f).bits == 0x3F80 && e8m0_for(7.0f, 7.0f) == 127);

}  // namespace
}  // namespace kt::inline formats
