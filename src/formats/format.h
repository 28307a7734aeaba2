// What quantised bytes mean, as a value. A Format says how codes become numbers; it knows no file, no
// checkpoint dialect and no instruction set.
//
//   value(row, k) = (code - bias) * scale - min
//
// `scale` and `min` hold over a span of `span.k` consecutive columns of one row (0: the whole row) and over
// `span.n` consecutive rows. With Scale::kS8F16 the scale is a signed 8-bit integer per span times an f16 per
// super-block of `span.super_k` columns (the K-quants), times a constant of the code (code_unit); Min::kS8F16 likewise,
// without the constant. With Min::kZero the subtrahend is zero * scale, an unsigned 8-bit zero point per span, so that
// value = (code - zero) * scale.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kt::inline formats {

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
  // Numbers that checkpoints look up several at a time, in a table of the code ("grid", grids.h): 7 bits, kGridBias
  // above the number. At the end: files of GPU kernels know the others by their place.
  kIq2Xxs,
  kIq2Xs,
  kIq2S,
  kIq3Xxs,
  kIq3S,
  kIq1,
};

enum class Scale : uint8_t { kNone, kF32, kBf16, kF16, kE8m0, kS8F16, kE4m3 };
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
    case Code::kIq2Xxs:
    case Code::kIq2Xs:
    case Code::kIq2S:
    case Code::kIq3Xxs:
    case Code::kIq3S:
    case Code::kIq1:
      return 7;
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

// What numbers of a grid are: how many share an index, bits of an index beyond eight, whether each has a sign bit of
// its own, the largest, and what one is worth, a power of two.
struct Grid {
  int numbers = 0;  // 0: no grid
  int high_bits = 0;
  bool signs = false;
  int largest = 0;
  float unit = 1;
};
constexpr Grid grid_of(Code code) {
  switch (code) {
    case Code::kIq2Xxs:
      return {8, 0, true, 43, 0.125f};
    case Code::kIq2Xs:
      return {8, 1, true, 43, 0.125f};
    case Code::kIq2S:
      return {8, 2, true, 43, 0.125f};
    case Code::kIq3Xxs:
      return {4, 0, true, 62, 0.25f};
    case Code::kIq3S:
      return {4, 1, true, 15, 1};
    // 8 * -1, 0 or 1, and 1 more or less for all of an index: high bits are 3 of the index, and which.
    case Code::kIq1:
      return {8, 4, false, 9, 0.125f};
    default:
      return {};
  }
}
constexpr bool is_grid(Code code) { return grid_of(code).numbers > 0; }
inline constexpr int kGridBias = 64;  // codes are 2 to 126, which bytes with and without a sign hold

// What one is worth beside its scale.
constexpr float code_unit(Code code) { return grid_of(code).unit; }

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
    case Scale::kE4m3:  // without a sign
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
// Unsigned in formats with a min and signed in those without; of grids odd numbers, s standing for 2 s + 1. In a
// MatrixView both are 8 bits always.
constexpr int span_scale_bits(Code code) {
  if (code == Code::kIq1) return 3;
  return code == Code::kU2 || is_grid(code) ? 4 : code == Code::kU6 ? 8 : 6;
}

// Whether quantise() makes the format of other weights. Grids come from files that were calibrated for them.
constexpr bool can_round_to(const Format& format) { return !is_grid(format.code); }

// The format of that name (known_formats.h); an Error that lists the known names otherwise.
Format format_named(std::string_view name);
// Its name, or a description of its parts when it has none.
std::string name_of(const Format& format);
// Bits per weight as stored in a checkpoint, scales included, for an n x k matrix.
double stored_bits(const Format& format, int64_t n, int64_t k);

}  // namespace kt::inline formats
