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

// The format of that name (known_formats.h); an Error that lists the known names otherwise.
Format format_named(std::string_view name);
// Its name, or a description of its parts when it has none.
std::string name_of(const Format& format);
// Bits per weight as stored in a checkpoint, scales included, for an n x k matrix.
double stored_bits(const Format& format, int64_t n, int64_t k);

}  // namespace kt
