// Narrow floating-point numbers as plain bits and their exact conversions to and from f32. Types of our own
// because not every compiler we build with has _Float16 and __bf16. Everything is integer arithmetic on the
// bit patterns: constexpr, the same on every machine, independent of the rounding mode and of flush-to-zero.
// Kernels have faster vector forms; these are what those are tested against.
#pragma once
#include <bit>
#include <cstdint>

namespace kt::inline formats {

struct bf16 {
  uint16_t bits = 0;
  bool operator==(const bf16&) const = default;
};

struct f16 {
  uint16_t bits = 0;
  bool operator==(const f16&) const = default;
};

namespace detail {

// Drops the low `shift` bits, rounding half to even; 1 <= shift <= 24 and no overflow of the sum.
constexpr uint32_t drop_bits(uint32_t bits, int shift) {
  return (bits + ((1u << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift;
}

// The magnitude bits of a finite |f32| rounded half to even to `mantissa` stored bits and exponent bias
// `bias`, denormals included. The exponent is not bounded above: the caller compares with its largest code.
constexpr uint32_t narrow_magnitude(uint32_t magnitude, int mantissa, int bias) {
  const int exponent = static_cast<int>(magnitude >> 23) - 127 + bias;
  const uint32_t fraction = magnitude & 0x7FFFFF;
  const int drop = 23 - mantissa;
  if (exponent >= 1) return drop_bits((static_cast<uint32_t>(exponent) << 23) | fraction, drop);
  const int shift = drop + 1 - exponent;
  if (shift > 24) return 0;  // below half of the smallest denormal
  return drop_bits(0x800000 | fraction, shift);
}

// The f32 bits of a finite narrow magnitude: exact. `bias` < 127, so every narrow denormal is an f32 normal.
constexpr uint32_t widen_magnitude(uint32_t magnitude, int mantissa, int bias) {
  const uint32_t exponent = magnitude >> mantissa;
  const uint32_t fraction = magnitude & ((1u << mantissa) - 1);
  if (exponent != 0) {
    return ((exponent + static_cast<uint32_t>(127 - bias)) << 23) | (fraction << (23 - mantissa));
  }
  if (fraction == 0) return 0;
  const int top = std::bit_width(fraction) - 1;  // the leading one becomes the hidden bit
  const uint32_t wide_exponent = static_cast<uint32_t>(127 + 1 - bias - mantissa + top);
  return (wide_exponent << 23) | ((fraction << (23 - top)) & 0x7FFFFF);
}

constexpr uint32_t sign_of(float value) { return std::bit_cast<uint32_t>(value) >> 31; }
constexpr uint32_t magnitude_of(float value) { return std::bit_cast<uint32_t>(value) & 0x7FFFFFFF; }
inline constexpr uint32_t kInfinity = 0x7F800000;

}  // namespace detail

constexpr bool is_finite(float value) { return detail::magnitude_of(value) < detail::kInfinity; }

constexpr float to_f32(bf16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

// Round half even; overflow gives infinity; NaN stays NaN, made quiet, sign and payload kept.
constexpr bf16 to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (detail::magnitude_of(value) > detail::kInfinity) {
    return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  }
  return {static_cast<uint16_t>(detail::drop_bits(bits & 0x7FFFFFFF, 16) | ((bits >> 16) & 0x8000))};
}

constexpr float to_f32(f16 value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7FFFu;
  if (magnitude < 0x7C00) return std::bit_cast<float>(sign | detail::widen_magnitude(magnitude, 10, 15));
  const uint32_t quiet = magnitude > 0x7C00 ? 0x400000u : 0;
  return std::bit_cast<float>(sign | detail::kInfinity | quiet | ((magnitude & 0x3FF) << 13));
}

// Round half even, denormals included; beyond 65504 and its half step gives infinity; NaN stays NaN, quiet.
constexpr f16 to_f16(float value) {
  const uint32_t sign = detail::sign_of(value) << 15;
  const uint32_t magnitude = detail::magnitude_of(value);
  uint32_t narrow = 0;
  if (magnitude > detail::kInfinity) {
    narrow = 0x7E00 | ((magnitude >> 13) & 0x3FF);
  } else {
    narrow = detail::narrow_magnitude(magnitude, 10, 15);
    if (narrow > 0x7C00) narrow = 0x7C00;
  }
  return {static_cast<uint16_t>(sign | narrow)};
}

// E4M3 without infinities: 0x7F and 0xFF are NaN, the largest number is 448.
inline constexpr float kE4m3Max = 448.0f;
constexpr bool is_nan_e4m3(uint8_t code) { return (code & 0x7F) == 0x7F; }

constexpr float e4m3_to_f32(uint8_t code) {
  const uint32_t sign = (code & 0x80u) << 24;
  if (is_nan_e4m3(code)) return std::bit_cast<float>(sign | 0x7FC00000u);
  return std::bit_cast<float>(sign | detail::widen_magnitude(code & 0x7Fu, 3, 7));
}

// Round half even; beyond 448, infinities included, gives 448; NaN stays NaN.
constexpr uint8_t to_e4m3(float value) {
  const uint32_t sign = detail::sign_of(value) << 7;
  const uint32_t magnitude = detail::magnitude_of(value);
  if (magnitude > detail::kInfinity) return static_cast<uint8_t>(sign | 0x7F);
  const uint32_t narrow = detail::narrow_magnitude(magnitude, 3, 7);
  return static_cast<uint8_t>(sign | (narrow > 0x7E ? 0x7E : narrow));
}

// E2M1: 0 0.5 1 1.5 2 3 4 6 and their negatives in the low four bits; no infinity and no NaN.
inline constexpr float kE2m1Max = 6.0f;

constexpr float e2m1_to_f32(uint8_t code) {
  return std::bit_cast<float>(((code & 8u) << 28) | detail::widen_magnitude(code & 7u, 1, 1));
}

// Round half even; beyond 6 gives 6. NaN has no image here and gives 6 as well: refuse it before.
constexpr uint8_t to_e2m1(float value) {
  const uint32_t narrow = detail::narrow_magnitude(detail::magnitude_of(value), 1, 1);
  return static_cast<uint8_t>((detail::sign_of(value) << 3) | (narrow > 7 ? 7 : narrow));
}

// E8M0: the power of two 2^(code - 127); code 0 is 2^-127, a denormal in f32; code 255 is NaN.
inline constexpr uint8_t kE8m0Nan = 255;

constexpr float e8m0_to_f32(uint8_t code) {
  if (code == kE8m0Nan) return std::bit_cast<float>(0x7FC00000u);
  return std::bit_cast<float>(code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23);
}

// The smallest E8M0 scale s with amax <= limit * s, or the largest scale if none is large enough; code 0 for
// amax = 0. `amax` is finite and not negative, `limit` at least 1. With `limit` half a step above the largest
// code value, that value's rounding error is no worse than its neighbours' and the scale is as fine as can
// be.
constexpr uint8_t e8m0_for(float amax, float limit) {
  // amax / limit lies above 2^(e - 1) and below 2^(e + 1), e the difference of exponents: start from e.
  const int difference = static_cast<int>(std::bit_cast<uint32_t>(amax) >> 23) -
                         static_cast<int>(std::bit_cast<uint32_t>(limit) >> 23);
  int code = difference < -127 ? 0 : difference + 127;
  if (code >= kE8m0Nan) return kE8m0Nan - 1;
  const auto power = std::bit_cast<double>(static_cast<uint64_t>(code - 127 + 1023) << 52);
  if (amax > limit * power && code < kE8m0Nan - 1) ++code;
  return static_cast<uint8_t>(code);
}
// The half steps above the largest codes, for e8m0_for.
inline constexpr float kE2m1Limit = 7.0f;
inline constexpr float kE4m3Limit = 464.0f;

// Round half even of |value| < 2^22, where adding 1.5 * 2^23 leaves no fraction bits. Unlike nearbyint it
// vectorises on every baseline; it needs the default rounding mode, as everything else does.
constexpr float round_half_even(float value) { return (value + 12582912.0f) - 12582912.0f; }

}  // namespace kt::inline formats
