// What quantised bytes mean, as a value. A Format says how codes become numbers; it knows no file, no
// checkpoint dialect and no instruction set.
//
//   value(row, k) = (code - bias) * scale - min
//
// `scale` and `min` hold over a span of `span.k` consecutive columns of one row (0: the whole row) and over
// `span.n` consecutive rows. With Scale::kS8F16 the scale is a signed 8-bit integer per span times an f16 per
// super-block of `span.super_k` columns (the K-quants); Min::kS8F16 likewise. With Min::kZero the subtrahend
// is zero * scale, an unsigned 8-bit zero point per span, so that value = (code - zero) * scale.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kt {

enum class Code : uint8_t {
  kI8,  // two's complement
  kU2,  // unsigned integers, 2 to 6 bits
  kU3,
  kU4,
  kU5,
  kU6,
  kIq4,   // 4-bit index into the non-linear table kIq4Values
  kE2m1,  // 4-bit float of the MX formats
  kE4m3,  // 8-bit float, no infinities, 0x7F and 0xFF are NaN
  kBf16,
  kF16,
  kF32,
};

enum class Scale : uint8_t { kNone, kF32, kBf16, kF16, kE8m0, kS8F16 };
enum class Min : uint8_t { kNone, kZero, kF16, kS8F16 };

struct Span {
  int k = 0;        // columns one scale holds over; 0 = the whole row
  int n = 1;        // rows one scale holds over
  int super_k = 0;  // columns one f16 factor holds over; only with kS8F16
  bool operator==(const Span&) const = default;
};

struct Format {
  Code code = Code::kF32;
  int bias = 0;
  Scale scale = Scale::kNone;
  Min min = Min::kNone;
  Span span;
  bool operator==(const Format&) const = default;
};

struct NamedFormat {
  std::string_view name;
  Format format;
  double bits;  // per weight as stored in a checkpoint, scales included, for long rows
};

// Every format the product speaks of by name. A new one made of known parts is one more line.
inline constexpr auto kFormats = std::to_array<NamedFormat>({
    {"int8", {Code::kI8, 0, Scale::kF32, Min::kNone, {}}, 8},
    {"int4", {Code::kU4, 8, Scale::kF32, Min::kNone, {}}, 4},
    {"int4_g32", {Code::kU4, 8, Scale::kBf16, Min::kNone, {.k = 32}}, 4.5},
    {"int4_g64", {Code::kU4, 8, Scale::kBf16, Min::kNone, {.k = 64}}, 4.25},
    {"int4_g128", {Code::kU4, 8, Scale::kBf16, Min::kNone, {.k = 128}}, 4.125},
    {"int4_g32_zero", {Code::kU4, 0, Scale::kF16, Min::kZero, {.k = 32}}, 4.625},
    {"int4_g64_zero", {Code::kU4, 0, Scale::kF16, Min::kZero, {.k = 64}}, 4.3125},
    {"int4_g128_zero", {Code::kU4, 0, Scale::kF16, Min::kZero, {.k = 128}}, 4.15625},
    {"fp8", {Code::kE4m3, 0, Scale::kF32, Min::kNone, {.k = 128, .n = 128}}, 8 + 32.0 / (128 * 128)},
    {"fp8_row", {Code::kE4m3, 0, Scale::kF32, Min::kNone, {}}, 8},
    {"bf16", {Code::kBf16, 0, Scale::kNone, Min::kNone, {}}, 16},
    {"fp16", {Code::kF16, 0, Scale::kNone, Min::kNone, {}}, 16},
    {"f32", {Code::kF32, 0, Scale::kNone, Min::kNone, {}}, 32},
    {"mxfp4", {Code::kE2m1, 0, Scale::kE8m0, Min::kNone, {.k = 32}}, 4.25},
    {"mxfp8", {Code::kE4m3, 0, Scale::kE8m0, Min::kNone, {.k = 32}}, 8.25},
    {"q4_0", {Code::kU4, 8, Scale::kF16, Min::kNone, {.k = 32}}, 4.5},
    {"q4_1", {Code::kU4, 0, Scale::kF16, Min::kF16, {.k = 32}}, 5},
    {"q5_0", {Code::kU5, 16, Scale::kF16, Min::kNone, {.k = 32}}, 5.5},
    {"q5_1", {Code::kU5, 0, Scale::kF16, Min::kF16, {.k = 32}}, 6},
    {"q8_0", {Code::kI8, 0, Scale::kF16, Min::kNone, {.k = 32}}, 8.5},
    {"q2_k", {Code::kU2, 0, Scale::kS8F16, Min::kS8F16, {.k = 16, .super_k = 256}}, 2.625},
    {"q3_k", {Code::kU3, 4, Scale::kS8F16, Min::kNone, {.k = 16, .super_k = 256}}, 3.4375},
    {"q4_k", {Code::kU4, 0, Scale::kS8F16, Min::kS8F16, {.k = 32, .super_k = 256}}, 4.5},
    {"q5_k", {Code::kU5, 0, Scale::kS8F16, Min::kS8F16, {.k = 32, .super_k = 256}}, 5.5},
    {"q6_k", {Code::kU6, 32, Scale::kS8F16, Min::kNone, {.k = 16, .super_k = 256}}, 6.5625},
    {"iq4_nl", {Code::kIq4, 0, Scale::kF16, Min::kNone, {.k = 32}}, 4.5},
    {"iq4_xs", {Code::kIq4, 0, Scale::kS8F16, Min::kNone, {.k = 32, .super_k = 256}}, 4.25},
});

// Entries of the non-linear 4-bit table, exact small integers.
inline constexpr std::array<int8_t, 16> kIq4Values = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                      1,    13,   25,  38,  53,  69,  89,  113};

constexpr int code_bits(Code code) {
  switch (code) {
    case Code::kU2:
      return 2;
    case Code::kU3:
      return 3;
    case Code::kU4:
    case Code::kIq4:
    case Code::kE2m1:
      return 4;
    case Code::kU5:
      return 5;
    case Code::kU6:
      return 6;
    case Code::kI8:
    case Code::kE4m3:
      return 8;
    case Code::kBf16:
    case Code::kF16:
      return 16;
    case Code::kF32:
      return 32;
  }
  return 0;
}

// Integer codes multiply as 8-bit integers; the others as floating point.
constexpr bool is_integer(Code code) {
  return code != Code::kE2m1 && code != Code::kE4m3 && code != Code::kBf16 && code != Code::kF16 &&
         code != Code::kF32;
}

constexpr int scale_bytes(Scale scale) {
  switch (scale) {
    case Scale::kNone:
      return 0;
    case Scale::kF32:
      return 4;
    case Scale::kBf16:
    case Scale::kF16:
      return 2;
    case Scale::kE8m0:
    case Scale::kS8F16:
      return 1;
  }
  return 0;
}

constexpr int min_bytes(Min min) {
  switch (min) {
    case Min::kNone:
      return 0;
    case Min::kF16:
      return 2;
    case Min::kZero:
    case Min::kS8F16:
      return 1;
  }
  return 0;
}

// Bits that the integer scale of one span takes in a checkpoint's super-block, and its min where it has one.
// Unsigned in formats with a min and signed in those without. In a MatrixView both are 8 bits always.
constexpr int span_scale_bits(Code code) { return code == Code::kU2 ? 4 : code == Code::kU6 ? 8 : 6; }

// The format of that name; an Error that lists the known names otherwise.
Format format_named(std::string_view name);
// Its name, or a description of its parts when it has none.
std::string name_of(const Format& format);
// Bits per weight as stored in a checkpoint, scales included, for an n x k matrix.
double stored_bits(const Format& format, int64_t n, int64_t k);

}  // namespace kt
