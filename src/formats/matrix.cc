// What a MatrixView's bytes mean, one element at a time and by rows, and what may not be in them.
#include "formats/matrix.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "base/checked.h"
#include "base/error.h"
#include "formats/floats.h"

namespace kt::inline formats {
namespace {

template <class T>
T load(const uint8_t* array, int64_t index) {
  T value;
  std::memcpy(&value, array + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

int64_t span_of(const Format& format, int64_t column) { return format.span.k ? column / format.span.k : 0; }

int64_t scale_rows(const Format& format, int64_t n) { return ceil_div<int64_t>(n, format.span.n); }

// Index of (row, column) in an array [n, spans(k)].
int64_t span_index(const MatrixView& w, int64_t row, int64_t column) {
  return row * spans(w.format, w.k) + span_of(w.format, column);
}

// The integer of a span times the f16 factor of its super-block.
float super_product(const MatrixView& w, const uint8_t* integers, const uint8_t* factors, int64_t row,
                    int64_t column) {
  const auto integer = load<int8_t>(integers, span_index(w, row, column));
  const auto factor = load<f16>(factors, row * supers(w.format, w.k) + column / w.format.span.super_k);
  return static_cast<float>(integer) * to_f32(factor);
}

// (code - bias) of every 8-bit pattern; patterns beyond the code's width repeat the shorter ones.
std::array<float, 256> unscaled_table(const Format& format) {
  std::array<float, 256> table;
  const uint32_t mask = (1u << code_bits(format.code)) - 1;
  for (uint32_t code = 0; code < 256; ++code) {
    table[code] = code_value(format.code, code & mask) - static_cast<float>(format.bias);
  }
  return table;
}

[[noreturn]] void not_finite(std::string_view name, std::string_view what, int64_t row, int64_t column) {
  fail("{}: {} of row {}, column {} is not a finite number", name, what, row, column);
}

// The first code that is no finite number, if this code has such patterns at all.
void check_codes(const MatrixView& w, std::string_view name) {
  if (is_integer(w.format.code) || w.format.code == Code::kE2m1) return;
  const int bytes = code_bytes(w.format.code);
  for (int64_t i = 0; i < w.n * w.k; ++i) {
    const uint32_t code = bytes == 1   ? w.codes[i]
                          : bytes == 2 ? load<uint16_t>(w.codes, i)
                                       : load<uint32_t>(w.codes, i);
    if (!is_finite(code_value(w.format.code, code))) not_finite(name, "the code", i / w.k, i % w.k);
  }
}

}  // namespace

int code_bytes(Code code) { return code == Code::kF32 ? 4 : code_bits(code) == 16 ? 2 : 1; }

int64_t spans(const Format& format, int64_t k) {
  return format.span.k == 0 ? 1 : ceil_div<int64_t>(k, format.span.k);
}

int64_t supers(const Format& format, int64_t k) {
  return format.span.super_k == 0 ? 0 : ceil_div<int64_t>(k, format.span.super_k);
}

void check_shape(const Format& format, int64_t n, int64_t k, std::string_view name) {
  if (n < 1 || k < 1) fail("{}: expected at least one row and one column, got [{}, {}]", name, n, k);
  const Span& span = format.span;
  const bool has_supers = format.scale == Scale::kS8F16 || format.min == Min::kS8F16;
  KT_CHECK(span.k >= 0 && span.n >= 1 && span.super_k >= 0, "{}: spans {} x {}", name, span.n, span.k);
  KT_CHECK(!has_supers || (span.super_k > 0 && span.k > 0 && span.super_k % span.k == 0 && span.n == 1),
           "{}: super-blocks of {} in spans of {}", name, span.super_k, span.k);
  if (has_supers && k % span.super_k != 0) {
    fail("{}: {} needs a multiple of {} columns, got [{}, {}]", name, name_of(format), span.super_k, n, k);
  }
  checked_mul(checked_mul(n, k, name), int64_t{8}, name);
}

Matrix::Matrix(const Format& format, int64_t n, int64_t k) : format(format), n(n), k(k) {
  check_shape(format, n, k, "matrix");
  const int64_t row_spans = spans(format, k), row_supers = kt::supers(format, k);
  codes.resize(n * k * code_bytes(format.code));
  scales.resize(scale_rows(format, n) * row_spans * scale_bytes(format.scale));
  mins.resize(n * row_spans * min_bytes(format.min));
  if (format.scale == Scale::kS8F16) supers.resize(n * row_supers * 2);
  if (format.min == Min::kS8F16) super_mins.resize(n * row_supers * 2);
}

MatrixView Matrix::view() const {
  const auto pointer = [](const std::vector<uint8_t>& bytes) {
    return bytes.empty() ? nullptr : bytes.data();
  };
  return {.format = format,
          .n = n,
          .k = k,
          .codes = pointer(codes),
          .scales = pointer(scales),
          .mins = pointer(mins),
          .supers = pointer(supers),
          .super_mins = pointer(super_mins)};
}

float code_value(Code code, uint32_t code_bits) {
  switch (code) {
    case Code::kI8:
      return static_cast<float>(static_cast<int8_t>(code_bits));
    case Code::kU2:
    case Code::kU3:
    case Code::kU4:
    case Code::kU5:
    case Code::kU6:
    case Code::kIq2Xxs:
    case Code::kIq2Xs:
    case Code::kIq2S:
    case Code::kIq3Xxs:
    case Code::kIq3S:
    case Code::kIq1:
      return static_cast<float>(code_bits);
    case Code::kIq4:
      return static_cast<float>(kIq4Values[code_bits & 15]);
    case Code::kE2m1:
      return e2m1_to_f32(static_cast<uint8_t>(code_bits));
    case Code::kE4m3:
      return e4m3_to_f32(static_cast<uint8_t>(code_bits));
    case Code::kBf16:
      return to_f32(bf16{static_cast<uint16_t>(code_bits)});
    case Code::kF16:
      return to_f32(f16{static_cast<uint16_t>(code_bits)});
    case Code::kF32:
      return std::bit_cast<float>(code_bits);
  }
  return 0;
}

float scale_at(const MatrixView& w, int64_t row, int64_t column) {
  const int64_t index = span_index(w, row / w.format.span.n, column);
  switch (w.format.scale) {
    case Scale::kNone:
      return 1;
    case Scale::kF32:
      return load<float>(w.scales, index);
    case Scale::kBf16:
      return to_f32(load<bf16>(w.scales, index));
    case Scale::kF16:
      return to_f32(load<f16>(w.scales, index));
    case Scale::kE8m0:
      return e8m0_to_f32(w.scales[index]);
    case Scale::kS8F16:
      return super_product(w, w.scales, w.supers, row, column) * code_unit(w.format.code);
    case Scale::kE4m3:
      return e4m3_to_f32(w.scales[index]);
  }
  return 0;
}

float min_at(const MatrixView& w, int64_t row, int64_t column) {
  const int64_t index = span_index(w, row, column);
  switch (w.format.min) {
    case Min::kNone:
      return 0;
    case Min::kZero:
      return static_cast<float>(w.mins[index]) * scale_at(w, row, column);
    case Min::kF16:
      return to_f32(load<f16>(w.mins, index));
    case Min::kS8F16:
      return super_product(w, w.mins, w.super_mins, row, column);
  }
  return 0;
}

float value_at(const MatrixView& w, int64_t row, int64_t column) {
  const int64_t index = row * w.k + column;
  const int bytes = code_bytes(w.format.code);
  const uint32_t code = bytes == 1   ? w.codes[index]
                        : bytes == 2 ? load<uint16_t>(w.codes, index)
                                     : load<uint32_t>(w.codes, index);
  const float unbiased = code_value(w.format.code, code) - static_cast<float>(w.format.bias);
  const float scale = scale_at(w, row, column);
  if (w.format.min == Min::kZero) {
    return (unbiased - static_cast<float>(w.mins[span_index(w, row, column)])) * scale;
  }
  return unbiased * scale - min_at(w, row, column);
}

void dequantise(const MatrixView& w, std::span<float> out) {
  check_shape(w.format, w.n, w.k, "dequantise");
  KT_CHECK(std::ssize(out) == w.n * w.k, "room for {} values, [{}, {}] has more or fewer", out.size(), w.n,
           w.k);
  if (code_bytes(w.format.code) != 1) {
    for (int64_t i = 0; i < w.n * w.k; ++i) out[i] = value_at(w, i / w.k, i % w.k);
    return;
  }
  // The same operations as value_at, with what a span shares looked up once.
  const std::array<float, 256> unscaled = unscaled_table(w.format);
  const int64_t step = w.format.span.k == 0 ? w.k : w.format.span.k;
  for (int64_t row = 0; row < w.n; ++row) {
    for (int64_t begin = 0; begin < w.k; begin += step) {
      const int64_t end = std::min(begin + step, w.k);
      const uint8_t* codes = w.codes + row * w.k;
      float* values = out.data() + row * w.k;
      const float scale = scale_at(w, row, begin);
      if (w.format.min == Min::kZero) {
        const auto zero = static_cast<float>(w.mins[span_index(w, row, begin)]);
        for (int64_t i = begin; i < end; ++i) values[i] = (unscaled[codes[i]] - zero) * scale;
      } else {
        const float min = min_at(w, row, begin);
        for (int64_t i = begin; i < end; ++i) values[i] = unscaled[codes[i]] * scale - min;
      }
    }
  }
}

void check_finite(const MatrixView& w, std::string_view name) {
  check_codes(w, name);
  const int64_t step = w.format.span.k == 0 ? w.k : w.format.span.k;
  const auto check = [&](float (*at)(const MatrixView&, int64_t, int64_t), int64_t row_step,
                         std::string_view what) {
    for (int64_t row = 0; row < w.n; row += row_step) {
      for (int64_t column = 0; column < w.k; column += step) {
        if (!is_finite(at(w, row, column))) not_finite(name, what, row, column);
      }
    }
  };
  // An infinite factor times a zero integer is NaN, so a bad super-block factor shows in every span of it.
  if (w.format.scale != Scale::kNone) check(scale_at, w.format.span.n, "the scale");
  if (w.format.min != Min::kNone) check(min_at, 1, "the min");
}

}  // namespace kt::inline formats
