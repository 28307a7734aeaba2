// Round-to-nearest into any Format. Per span: choose a scale (and min), round it to the type it is stored in,
// then round every value against what was stored. No search and no calibration.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "formats/floats.h"
#include "formats/matrix.h"

namespace kt::inline formats {
namespace {

// Part of the values that shares one scale, and where its codes go.
struct Patch {
  const float* values;
  uint8_t* codes;
  int64_t rows, columns, stride;
  int64_t row, column;  // of the first value, for errors
};

// The range of a patch. `extreme` is the value of largest magnitude with its sign.
struct Range {
  float lowest = 0, highest = 0, extreme = 0, amax = 0;
};

template <class Visit>
void for_each(const Patch& patch, Visit visit) {
  for (int64_t r = 0; r < patch.rows; ++r) {
    for (int64_t c = 0; c < patch.columns; ++c)
      visit(patch.values[r * patch.stride + c], r * patch.stride + c);
  }
}

Range range_of(const Patch& patch) {
  Range range{patch.values[0], patch.values[0], 0, 0};
  for (int64_t r = 0; r < patch.rows; ++r) {
    const float* values = patch.values + r * patch.stride;
    for (int64_t c = 0; c < patch.columns; ++c) {
      range.lowest = std::min(range.lowest, values[c]);
      range.highest = std::max(range.highest, values[c]);
    }
  }
  range.extreme = -range.lowest > range.highest ? range.lowest : range.highest;
  range.amax = std::fabs(range.extreme);
  return range;
}

// Beyond this, a value rounded up to the next code can be infinite.
constexpr float kLargestScaled = 0x1p127f;

void check_values(const Format& format, std::span<const float> values, int64_t k) {
  for (size_t i = 0; i < values.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    if (!is_finite(values[i])) {
      fail("quantise: the value of row {}, column {} is not a finite number", at / k, at % k);
    }
    if (format.scale != Scale::kNone && std::fabs(values[i]) > kLargestScaled) {
      fail("quantise: row {}, column {}: {} is beyond {}, the largest value {} can take", at / k, at % k,
           values[i], kLargestScaled, name_of(format));
    }
  }
}

template <class T>
void store(std::vector<uint8_t>& bytes, int64_t index, T value) {
  std::memcpy(bytes.data() + index * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

[[noreturn]] void out_of_reach(const Format& format, const Patch& patch, float wanted) {
  fail("quantise: row {}, columns {} to {}: {} would need a scale or offset of {}, which it cannot store",
       patch.row, patch.column, patch.column + patch.columns - 1, name_of(format), wanted);
}

// `wanted` rounded to f16 and widened again; minus zero becomes zero, so that zeros come back as zeros.
f16 round_to_f16(const Format& format, const Patch& patch, float wanted) {
  const f16 rounded = to_f16(wanted);
  if (!is_finite(to_f32(rounded))) out_of_reach(format, patch, wanted);
  return (rounded.bits & 0x7FFF) == 0 ? f16{} : rounded;
}

// Stores `wanted` as scale number `index`; returns what was stored.
float store_scale(Matrix& out, int64_t index, const Patch& patch, float wanted) {
  if (!is_finite(wanted)) out_of_reach(out.format, patch, wanted);
  switch (out.format.scale) {
    case Scale::kF32:
      store(out.scales, index, wanted);
      return wanted;
    case Scale::kBf16: {
      const bf16 rounded = to_bf16(wanted);
      if (!is_finite(to_f32(rounded))) out_of_reach(out.format, patch, wanted);
      store(out.scales, index, rounded);
      return to_f32(rounded);
    }
    case Scale::kF16: {
      const f16 rounded = round_to_f16(out.format, patch, wanted);
      store(out.scales, index, rounded);
      return to_f32(rounded);
    }
    case Scale::kE4m3: {
      if (wanted > kE4m3Max) out_of_reach(out.format, patch, wanted);
      out.scales[index] = to_e4m3(wanted);
      return e4m3_to_f32(out.scales[index]);
    }
    case Scale::kNone:
    case Scale::kE8m0:
    case Scale::kS8F16:
      break;
  }
  KT_CHECK(false, "store_scale: {}", name_of(out.format));
}

float largest_code(Code code) { return static_cast<float>((1 << code_bits(code)) - 1); }

// Rounds and saturates; in this order it is the same as the other way round, and infinities are harmless.
float rounded_within(float value, float lowest, float highest) {
  return round_half_even(std::clamp(value, lowest, highest));
}

uint8_t nearest_iq4(float value) {
  size_t best = 0;
  for (size_t i = 1; i < kIq4Values.size(); ++i) {
    const auto error = [&](size_t at) { return std::fabs(value - static_cast<float>(kIq4Values[at])); };
    if (error(i) < error(best)) best = i;
  }
  return static_cast<uint8_t>(best);
}

// The scale that spreads the codes over the range when there is no min. Codes with a bias reach one further
// down than up: where the scale may be negative, the extreme value is put on that lowest code exactly.
float wanted_scale(const Format& format, const Range& range) {
  if (range.amax == 0) return 0;
  switch (format.code) {
    case Code::kI8:
      return range.amax * (1.0f / 127);
    case Code::kIq4:
      return range.extreme / -127;
    case Code::kE4m3:
      return range.amax / kE4m3Max;
    case Code::kE2m1:
      return range.amax / kE2m1Max;
    default:
      break;
  }
  const auto bias = static_cast<float>(format.bias);
  if (format.scale == Scale::kF32) return range.amax / (16 * (bias - 1)) * 16;  // see encode_in_two_steps
  if (format.scale == Scale::kBf16) return range.amax / (bias - 0.5f);
  return range.extreme / -bias;
}

// int8 as the established converter rounds it: times the reciprocal. Where that overflows, which takes values
// near the smallest f32, divide instead.
void encode_int8(const Patch& patch, float scale) {
  const float reciprocal = 1 / scale;
  const bool divide = !is_finite(reciprocal);
  for_each(patch, [&](float value, int64_t at) {
    const float scaled = divide ? value / scale : value * reciprocal;
    patch.codes[at] = static_cast<uint8_t>(static_cast<int8_t>(rounded_within(scaled, -127, 127)));
  });
}

// Biased integers per row as the established converter rounds them: to eight bits first, then that magnitude
// to a multiple of 16, ties away from zero. The scale it stores belongs to the second step.
void encode_in_two_steps(const Patch& patch, float scale, int bias) {
  const float step = scale / 16, reciprocal = 1 / step;
  const bool divide = !is_finite(reciprocal);
  for_each(patch, [&](float value, int64_t at) {
    const float scaled = divide ? value / step : value * reciprocal;
    const int eight = static_cast<int>(rounded_within(scaled, -127, 127));
    const int magnitude = std::min((std::abs(eight) + 8) / 16, bias - 1);
    patch.codes[at] = static_cast<uint8_t>((eight < 0 ? -magnitude : magnitude) + bias);
  });
}

// Codes against a scale that is already stored; no min.
void encode(const Format& format, const Patch& patch, float scale) {
  if (scale == 0) {
    const int zero =
        format.code == Code::kIq4 ? 8 : format.bias;  // the table has no zero; any entry times 0 is
    for_each(patch, [&](float, int64_t at) { patch.codes[at] = static_cast<uint8_t>(zero); });
    return;
  }
  switch (format.code) {
    case Code::kI8:
      encode_int8(patch, scale);
      return;
    case Code::kIq4:
      for_each(patch, [&](float value, int64_t at) { patch.codes[at] = nearest_iq4(value / scale); });
      return;
    case Code::kE4m3:
      for_each(patch, [&](float value, int64_t at) { patch.codes[at] = to_e4m3(value / scale); });
      return;
    case Code::kE2m1:
      for_each(patch, [&](float value, int64_t at) { patch.codes[at] = to_e2m1(value / scale); });
      return;
    default:
      break;
  }
  if (format.scale == Scale::kF32) return encode_in_two_steps(patch, scale, format.bias);
  const auto bias = static_cast<float>(format.bias);
  const float highest = largest_code(format.code) - bias;
  for_each(patch, [&](float value, int64_t at) {
    patch.codes[at] = static_cast<uint8_t>(rounded_within(value / scale, -bias, highest) + bias);
  });
}

// Codes of value = code * scale - min, both already stored.
void encode_above(const Format& format, const Patch& patch, float scale, float min) {
  const float highest = largest_code(format.code);
  for_each(patch, [&](float value, int64_t at) {
    const float code = scale == 0 ? 0 : rounded_within((value + min) / scale, 0, highest);
    patch.codes[at] = static_cast<uint8_t>(code);
  });
}

// One span of a format whose scale stands alone.
void quantise_span(Matrix& out, int64_t index, const Patch& patch) {
  const Format& format = out.format;
  const Range range = range_of(patch);
  if (format.min == Min::kZero) {
    // Zero must be representable, so the range is stretched to hold it.
    const float lowest = std::min(range.lowest, 0.0f), highest = std::max(range.highest, 0.0f);
    const float top = largest_code(format.code);
    const float scale = store_scale(out, index, patch, (highest - lowest) / top);
    const float zero = scale == 0 ? 0 : rounded_within(-lowest / scale, 0, top);
    out.mins[index] = static_cast<uint8_t>(zero);
    for_each(patch, [&](float value, int64_t at) {
      const float code = scale == 0 ? 0 : rounded_within(value / scale, -zero, top - zero) + zero;
      patch.codes[at] = static_cast<uint8_t>(code);
    });
    return;
  }
  if (format.min == Min::kF16) {
    const f16 min = round_to_f16(format, patch, -range.lowest);
    store(out.mins, index, min);
    const float span = range.highest - range.lowest;
    const float scale = store_scale(out, index, patch, span / largest_code(format.code));
    return encode_above(format, patch, scale, to_f32(min));
  }
  if (format.scale == Scale::kE8m0) {
    const float limit = format.code == Code::kE2m1 ? kE2m1Limit : kE4m3Limit;
    out.scales[index] = e8m0_for(range.amax, limit);
    return encode(format, patch, range.amax == 0 ? 0 : e8m0_to_f32(out.scales[index]));
  }
  encode(format, patch, store_scale(out, index, patch, wanted_scale(format, range)));
}

// Integers for the scales (or mins) of one super-block and the f16 factor they share. Unsigned where the
// largest is at the top of the integers' range; signed where it is at the bottom, which reaches one further.
struct Factored {
  f16 factor;
  float lowest = 0, highest = 0;
  float integer(float wanted) const {
    return to_f32(factor) == 0 ? 0 : rounded_within(wanted / to_f32(factor), lowest, highest);
  }
};

Factored factor_out(const Format& format, const Patch& patch, float extreme) {
  const auto levels = static_cast<float>(1 << span_scale_bits(format.code));
  const bool is_signed = format.min == Min::kNone;
  const float lowest = is_signed ? -levels / 2 : 0, highest = is_signed ? levels / 2 - 1 : levels - 1;
  return {round_to_f16(format, patch, extreme / (is_signed ? lowest : highest)), lowest, highest};
}

// One super-block of one row; `patch` covers all of it.
void quantise_super(Matrix& out, int64_t super, int64_t first_span, const Patch& patch) {
  const Format& format = out.format;
  const int span_k = format.span.k, count = format.span.super_k / span_k;
  const bool has_min = format.min == Min::kS8F16;
  const auto span_patch = [&](int i) {
    const int64_t at = int64_t{i} * span_k;
    return Patch{patch.values + at, patch.codes + at, 1, span_k, patch.stride, patch.row, patch.column + at};
  };
  std::vector<float> scales(count), mins(count);
  float extreme = 0, deepest = 0;
  for (int i = 0; i < count; ++i) {
    const Range range = range_of(span_patch(i));
    mins[i] = has_min ? std::max(-range.lowest, 0.0f) : 0;  // stored unsigned
    scales[i] = has_min ? (range.highest + mins[i]) / largest_code(format.code) : wanted_scale(format, range);
    if (std::fabs(scales[i]) > std::fabs(extreme)) extreme = scales[i];
    deepest = std::max(deepest, mins[i]);
  }
  const Factored scale = factor_out(format, patch, extreme);
  store(out.supers, super, scale.factor);
  Factored min{};
  if (has_min) {
    min = factor_out(format, patch, deepest);
    store(out.super_mins, super, min.factor);
  }
  for (int i = 0; i < count; ++i) {
    const float integer = scale.integer(scales[i]);
    out.scales[first_span + i] = static_cast<uint8_t>(static_cast<int8_t>(integer));
    const float stored_scale = integer * to_f32(scale.factor);
    if (!has_min) {
      encode(format, span_patch(i), stored_scale);
      continue;
    }
    const float min_integer = min.integer(mins[i]);
    out.mins[first_span + i] = static_cast<uint8_t>(min_integer);
    encode_above(format, span_patch(i), stored_scale, min_integer * to_f32(min.factor));
  }
}

void quantise_plain(Matrix& out, std::span<const float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    bool finite = true;
    if (out.format.code == Code::kF32) {
      store(out.codes, at, values[i]);
    } else if (out.format.code == Code::kBf16) {
      store(out.codes, at, to_bf16(values[i]));
      finite = is_finite(to_f32(to_bf16(values[i])));
    } else {
      KT_CHECK(out.format.code == Code::kF16, "{} has no scale", name_of(out.format));
      store(out.codes, at, to_f16(values[i]));
      finite = is_finite(to_f32(to_f16(values[i])));
    }
    if (!finite) {
      fail("quantise: row {}, column {}: {} is beyond the largest {}", at / out.k, at % out.k, values[i],
           name_of(out.format));
    }
  }
}

}  // namespace

Matrix quantise(const Format& format, std::span<const float> values, int64_t n, int64_t k) {
  if (!can_round_to(format))
    fail_as(ErrorKind::kUnsupported,
            "{}: weights are read and computed in this format, not rounded to it: its grids are for files "
            "that were "
            "calibrated for them",
            name_of(format));
  check_shape(format, n, k, "quantise");
  if (std::ssize(values) != n * k) {
    fail("quantise: expected {} values for [{}, {}], got {}", n * k, n, k, values.size());
  }
  check_values(format, values, k);
  Matrix out(format, n, k);
  if (format.scale == Scale::kNone) {
    quantise_plain(out, values);
    return out;
  }
  const bool has_supers = format.scale == Scale::kS8F16;
  const int64_t step = has_supers ? format.span.super_k : format.span.k == 0 ? k : format.span.k;
  const int64_t row_step = format.span.n;
  KT_CHECK(row_step == 1 || format.min == Min::kNone, "mins shared by rows: {}", name_of(format));
  const int64_t row_spans = spans(format, k);
  for (int64_t row = 0; row < n; row += row_step) {
    for (int64_t column = 0; column < k; column += step) {
      const int64_t at = row * k + column;
      const Patch patch{.values = values.data() + at,
                        .codes = out.codes.data() + at,
                        .rows = std::min(row_step, n - row),
                        .columns = std::min(step, k - column),
                        .stride = k,
                        .row = row,
                        .column = column};
      if (has_supers) {
        const int64_t super = row * supers(format, k) + column / step;
        quantise_super(out, super, row * row_spans + column / format.span.k, patch);
      } else {
        quantise_span(out, row / row_step * row_spans + column / step, patch);
      }
    }
  }
  return out;
}

}  // namespace kt::inline formats
