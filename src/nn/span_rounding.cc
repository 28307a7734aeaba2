#include "nn/span_rounding.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/checked.h"
#include "base/error.h"
#include "formats/floats.h"

namespace kt::inline nn {
namespace {

bool is_plain(Scale scale) { return scale == Scale::kF32 || scale == Scale::kBf16 || scale == Scale::kF16; }

bool linear(Code code) { return is_integer(code) && code != Code::kIq4; }

uint8_t nearest_code(Code code, float value) {
  if (code == Code::kE4m3) return to_e4m3(value);
  if (code == Code::kE2m1) return to_e2m1(value);
  size_t best = 0;
  for (size_t i = 1; i < kIq4Values.size(); ++i)
    if (std::fabs(value - static_cast<float>(kIq4Values[i])) <
        std::fabs(value - static_cast<float>(kIq4Values[best])))
      best = i;
  return static_cast<uint8_t>(best);
}

// The code of `value` at a scale of `divisor`, as a number, for formats that are not linear.
float nearest_value(Code code, float value) { return code_value(code, nearest_code(code, value)); }

float as_stored(Scale type, float scale) {
  if (type == Scale::kBf16) return to_f32(to_bf16(scale));
  if (type == Scale::kF16) return to_f32(to_f16(scale));
  return scale;
}

void store_scale(Matrix& out, int64_t at, float scale) {
  uint8_t* to = out.scales.data() + at * scale_bytes(out.format.scale);
  if (out.format.scale == Scale::kBf16) {
    const bf16 narrow = to_bf16(scale);
    std::memcpy(to, &narrow, sizeof(narrow));
  } else if (out.format.scale == Scale::kF16) {
    const f16 narrow = to_f16(scale);
    std::memcpy(to, &narrow, sizeof(narrow));
  } else {
    std::memcpy(to, &scale, sizeof(scale));
  }
}

}  // namespace

SpanRounding::SpanRounding(Matrix& out, int64_t first, int64_t rows, bool packed_rule)
    : out_(out),
      first_(first),
      rows_(rows),
      packed_rule_(packed_rule),
      blocks_(static_cast<int>(ceil_div(rows, kBlockRows))) {
  const Format& format = out.format;
  if (format.scale == Scale::kNone || format.span.n != 1)
    fail_as(ErrorKind::kUnsupported,
            "gptq: {} {}; calibrated rounding takes formats with scales of their own for each row",
            name_of(format), format.scale == Scale::kNone ? "has no scales" : "shares scales among rows");
  if (packed_rule && (!linear(format.code) || format.min != Min::kNone || !is_plain(format.scale)))
    fail_as(ErrorKind::kUnsupported, "gptq: {} cannot be rounded by the rule of packed integers",
            name_of(format));
  span_k_ = format.span.k ? format.span.k : static_cast<int>(out.k);
  step_ = format.scale == Scale::kS8F16 ? format.span.super_k : span_k_;
  lanes_.resize(static_cast<size_t>(spans(format, out.k) * blocks_));
}

int SpanRounding::rows_of(int block) const {
  return static_cast<int>(std::min<int64_t>(kBlockRows, rows_ - int64_t{block} * kBlockRows));
}

// The factors of one row of `rounded`, whose columns are out_'s from `column` on.
void SpanRounding::store_factors(int column, int64_t row, const Matrix& rounded) {
  const auto copy = [&](std::vector<uint8_t>& to, const std::vector<uint8_t>& from, int64_t all, int64_t some,
                        int64_t at, int bytes) {
    if (!bytes || from.empty()) return;
    std::memcpy(to.data() + ((first_ + row) * all + at) * bytes,
                from.data() + row % kBlockRows * some * bytes, static_cast<size_t>(some * bytes));
  };
  const Format& format = out_.format;
  const int64_t all = spans(format, out_.k), some = spans(format, rounded.k), at = column / span_k_;
  copy(out_.scales, rounded.scales, all, some, at, scale_bytes(format.scale));
  copy(out_.mins, rounded.mins, all, some, at, min_bytes(format.min));
  if (!format.span.super_k) return;
  const int64_t super = column / format.span.super_k, of_all = supers(format, out_.k);
  copy(out_.supers, rounded.supers, of_all, 1, super, 2);
  copy(out_.super_mins, rounded.super_mins, of_all, 1, super, 2);
}

// What is stored for a span, as the arithmetic of round() wants it.
void SpanRounding::read(int span, int block) {
  Lanes& l = lanes(span, block);
  l = {};
  const Format& format = out_.format;
  const MatrixView view = out_.view();
  const auto top = static_cast<float>((1 << code_bits(format.code)) - 1);
  for (int r = 0; r < kBlockRows; ++r) {
    l.divisor[r] = 1;
    if (r >= rows_of(block)) continue;
    const int64_t row = first_ + int64_t{block} * kBlockRows + r, column = int64_t{span} * span_k_;
    l.scale[r] = scale_at(view, row, column);
    const bool zero_point = format.min == Min::kZero;
    const float zero = zero_point ? static_cast<float>(view.mins[row * spans(format, out_.k) + span]) : 0.0f;
    if (!zero_point) l.min[r] = min_at(view, row, column);
    l.offset[r] = static_cast<float>(format.bias) + zero;
    if (l.scale[r] == 0) continue;  // all codes are 0
    l.divisor[r] = l.scale[r];
    if (packed_rule_) {
      const auto half = static_cast<float>(1 << (code_bits(format.code) - 1));
      l.lowest[r] = -half;
      l.highest[r] = half - 1;
      continue;
    }
    const bool even = format.code == Code::kI8 || (format.scale == Scale::kF32 && format.bias);
    const float reach = format.code == Code::kI8 ? 127 : static_cast<float>(format.bias - 1);
    l.lowest[r] = even ? -reach : -l.offset[r];
    l.highest[r] = even ? reach : top - l.offset[r];
  }
}

// The scales of one block of rows by the packed rule: from values as the scales' type has them.
void SpanRounding::begin_packed(int column, int columns, int block, const float* values) {
  const Format& format = out_.format;
  const float half_range = static_cast<float>(1 << (code_bits(format.code) - 1)) - 0.5f;
  for (int c = 0; c < columns; c += span_k_)
    for (int r = 0; r < rows_of(block); ++r) {
      float largest = 0;
      for (int i = c; i < std::min(c + span_k_, columns); ++i)
        largest = std::max(largest, std::fabs(values[i * kBlockRows + r]));
      const int64_t row = first_ + int64_t{block} * kBlockRows + r;
      store_scale(out_, row * spans(format, out_.k) + (column + c) / span_k_,
                  as_stored(format.scale, as_stored(format.scale, largest) / half_range));
    }
}

// The scales of one block of rows as quantise() finds them.
void SpanRounding::begin_nearest(int column, int columns, int block, const float* values) {
  std::vector<float> plain(static_cast<size_t>(kBlockRows * columns));
  for (int r = 0; r < kBlockRows; ++r)
    for (int c = 0; c < columns; ++c)
      plain[static_cast<size_t>(r * columns + c)] = values[c * kBlockRows + r];
  const int rows = rows_of(block);
  const Matrix nearest =
      quantise(out_.format, std::span(plain).first(static_cast<size_t>(rows * columns)), rows, columns);
  for (int r = 0; r < rows; ++r) store_factors(column, int64_t{block} * kBlockRows + r, nearest);
}

void SpanRounding::begin(int column, const float* values, int64_t block_stride, const float* weight,
                         const ScaleSearch& wanted) {
  const int columns = static_cast<int>(std::min<int64_t>(step_, out_.k - column));
  for (int b = 0; b < blocks_; ++b) {
    const float* from = values + b * block_stride;
    if (packed_rule_)
      begin_packed(column, columns, b, from);
    else
      begin_nearest(column, columns, b, from);
    for (int c = 0; c < columns; c += span_k_) {
      const int span = (column + c) / span_k_;
      read(span, b);
      if (wanted.steps)
        search(span, b, from + c * kBlockRows, std::min(span_k_, columns - c), weight + c, wanted);
    }
  }
}

// Squared errors of the rows of a block at these scales.
void SpanRounding::errors(const Lanes& l, const float* scale, const float* values, int columns,
                          const float* weight, float* error) const {
  if (linear(out_.format.code)) {
    kernels_.scale_error({.lanes = &l,
                          .scale = scale,
                          .values = values,
                          .weight = weight,
                          .columns = columns,
                          .error = error});
    return;
  }
  std::fill_n(error, kBlockRows, 0.0f);
  for (int c = 0; c < columns; ++c, values += kBlockRows)
    for (int r = 0; r < kBlockRows; ++r) {
      const float off = values[r] - nearest_value(out_.format.code, values[r] / scale[r]) * scale[r];
      error[r] += weight[c] * off * off;
    }
}

void SpanRounding::search(int span, int block, const float* values, int columns, const float* weight,
                          const ScaleSearch& wanted) {
  const Format& format = out_.format;
  if (format.min != Min::kNone || !is_plain(format.scale)) return;
  Lanes& l = lanes(span, block);
  float best[kBlockRows], best_scale[kBlockRows];
  std::copy_n(l.scale, kBlockRows, best_scale);
  std::fill_n(best, kBlockRows, std::numeric_limits<float>::infinity());
  for (int s = 0; s <= wanted.steps; ++s) {
    const double factor = 1 - (1 - wanted.least) * s / wanted.steps;
    float scale[kBlockRows], divisor[kBlockRows], error[kBlockRows];
    for (int r = 0; r < kBlockRows; ++r) {
      scale[r] = as_stored(format.scale, static_cast<float>(factor * static_cast<double>(l.scale[r])));
      divisor[r] = scale[r] == 0 ? 1 : scale[r];
    }
    errors(l, divisor, values, columns, weight, error);
    for (int r = 0; r < kBlockRows; ++r)
      if (scale[r] != 0 && error[r] < best[r]) {
        best[r] = error[r];
        best_scale[r] = scale[r];
      }
  }
  for (int r = 0; r < rows_of(block); ++r) {
    if (l.scale[r] == 0) continue;
    l.scale[r] = l.divisor[r] = best_scale[r];
    const int64_t row = first_ + int64_t{block} * kBlockRows + r;
    store_scale(out_, row * spans(format, out_.k) + span, best_scale[r]);
  }
}

void SpanRounding::round(int column, const float* values, float* rest, int64_t block_stride, uint8_t* codes) {
  const int span = column / span_k_;
  const Code code = out_.format.code;
  if (linear(code)) {
    kernels_.round({.lanes = &lanes(span, 0),
                    .values = values,
                    .rest = rest,
                    .stride = block_stride,
                    .blocks = blocks_,
                    .codes = codes});
    return;
  }
  for (int b = 0; b < blocks_; ++b, values += block_stride, rest += block_stride, codes += kBlockRows) {
    const Lanes& l = lanes(span, b);
    for (int r = 0; r < rows_of(b); ++r) {
      codes[r] =
          l.scale[r] == 0 ? (code == Code::kIq4 ? 8 : 0) : nearest_code(code, values[r] / l.divisor[r]);
      rest[r] -= code_value(code, codes[r]) * l.scale[r];
    }
  }
}

void SpanRounding::store(const uint8_t* codes, std::span<const int> steps) {
  const int64_t width = int64_t{blocks_} * kBlockRows;
  for (int64_t r = 0; r < rows_; ++r) {
    uint8_t* to = out_.codes.data() + (first_ + r) * out_.k;
    for (const int step : steps) *to++ = codes[step * width + r];
  }
}

}  // namespace kt::inline nn
