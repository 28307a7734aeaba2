// A quantised matrix in the plain order every checkpoint dialect is turned into and every packing starts
// from: row-major, one element per code (sub-byte codes take a byte each), scales apart. Slow to multiply,
// easy to be right about.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "formats/format.h"

namespace kt::inline formats {

// Non-owning. All pointers are to row-major arrays:
//   codes       [n, k]                        1, 2 or 4 bytes each (code_bytes)
//   scales      [ceil(n/span.n), spans(k)]    in the scale's own type; null with Scale::kNone
//   mins        [n, spans(k)]                 u8, f16 or s8; null with Min::kNone
//   supers      [n, ceil(k/super_k)]          f16, with Scale::kS8F16
//   super_mins  [n, ceil(k/super_k)]          f16, with Min::kS8F16
struct MatrixView {
  Format format;
  int64_t n = 0, k = 0;
  const uint8_t* codes = nullptr;
  const uint8_t* scales = nullptr;
  const uint8_t* mins = nullptr;
  const uint8_t* supers = nullptr;
  const uint8_t* super_mins = nullptr;
};

struct Matrix {
  Format format;
  int64_t n = 0, k = 0;
  std::vector<uint8_t> codes, scales, mins, supers, super_mins;
  Matrix() = default;
  // Zero codes, scales and mins of the right sizes; check_shape() first.
  Matrix(const Format& format, int64_t n, int64_t k);
  MatrixView view() const;
};

int code_bytes(Code code);                        // bytes a code takes in a MatrixView: 1, 2 or 4
int64_t spans(const Format& format, int64_t k);   // spans along one row; 1 where a span is the whole row
int64_t supers(const Format& format, int64_t k);  // super-block factors along one row

// Throws an Error naming `name` unless `format` can hold n x k: both at least 1, the sizes in bytes within 64
// bits, and k a multiple of super_k where there are super-blocks. Any other last span may be shorter.
void check_shape(const Format& format, int64_t n, int64_t k, std::string_view name);

// The number a code stands for before bias, scale and min: exact in f32.
float code_value(Code code, uint32_t code_bits);
// scale and min of (row, column), each rounded to f32 as `value` uses them.
float scale_at(const MatrixView& w, int64_t row, int64_t column);
float min_at(const MatrixView& w, int64_t row, int64_t column);
// (code - bias) * scale - min, every operation rounded to f32; with Min::kZero (code - bias - zero) * scale.
float value_at(const MatrixView& w, int64_t row, int64_t column);
// All of it, row-major [n, k]; the same bits as value_at.
void dequantise(const MatrixView& w, std::span<float> out);

// Round to nearest into `format`: scales first, rounded to their stored type, then codes against the stored
// scales. int8 and int4 per row follow the established converter's rounding to the bit. Spans of zeros get
// zero scales and come back as zeros. An Error names row and column of a value not finite, above 2^127
// (but for formats without scales), or out of the scale's reach: an f16 holds 65504 at most. Rows are
// independent, in blocks of span.n.
Matrix quantise(const Format& format, std::span<const float> values, int64_t n, int64_t k);

// Throws an Error naming `name` if a code, scale or min is not a finite number.
void check_finite(const MatrixView& w, std::string_view name);

}  // namespace kt::inline formats
