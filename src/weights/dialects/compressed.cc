#include "weights/dialects/compressed.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "formats/floats.h"
#include "formats/known_formats.h"

namespace kt::inline weights {
namespace {

constexpr uint32_t kMagnitude = 0x7FFFFFFF;
constexpr uint32_t kInf = 0x7F800000;

// round(): a finite f32 to the nearest T as f32, half to even; infinity beyond T's reach. Without branches
// and calls, so that the loops below become vector code, which floats.h's bit-exact forms do not; a test
// holds the two against each other.
struct InBf16 {
  static constexpr float kEps = 0.0078125f;
  static float round(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    return std::bit_cast<float>((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u);
  }
  static void store(float value, std::byte* out) {
    const bf16 narrow = to_bf16(value);
    std::memcpy(out, &narrow, sizeof(narrow));
  }
};

struct InF16 {
  static constexpr float kEps = 0.0009765625f;
  static float round(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t normal = (bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000u;
    // Below 2^-14 an f16 is a multiple of 2^-24, which is the last place of numbers around 0.75.
    const float small = std::bit_cast<float>(bits & kMagnitude) + 0.75f - 0.75f;
    const uint32_t denormal = std::bit_cast<uint32_t>(small) | (bits & ~kMagnitude);
    const uint32_t chosen = (bits & kMagnitude) < 0x38800000 ? denormal : normal;
    const uint32_t infinite = kInf | (bits & ~kMagnitude);
    return std::bit_cast<float>((chosen & kMagnitude) > 0x477FE000 ? infinite : chosen);
  }
  static void store(float value, std::byte* out) {
    const f16 narrow = to_f16(value);
    std::memcpy(out, &narrow, sizeof(narrow));
  }
};

struct InF32 {
  static constexpr float kEps = 1.1920929e-07f;
  static float round(float value) { return value; }
  static void store(float value, std::byte* out) { std::memcpy(out, &value, sizeof(value)); }
};

// Rounds a row into `out` and returns the largest magnitude's bits before and after rounding, whichever is
// larger: at or above kInf something is not a finite T.
template <class T>
uint32_t round_row(const float* values, int64_t k, float* out) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < k; ++i) {
    const uint32_t before = std::bit_cast<uint32_t>(values[i]) & kMagnitude;
    const float rounded = T::round(values[i]);
    out[i] = rounded;
    // A NaN may round to anything; `before` tells.
    largest = std::max(largest, std::max(before, std::bit_cast<uint32_t>(rounded) & kMagnitude));
  }
  return largest;
}

float largest_magnitude(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i)
    largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & kMagnitude);
  return std::bit_cast<float>(largest);
}

template <class T>
void quantise_group(const float* values, int64_t count, float scale, float low, float high, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    const float quotient = T::round(values[i] / scale);
    const float bounded = std::min(std::max(quotient, low), high);
    codes[i] =
        static_cast<uint8_t>(static_cast<int32_t>(round_half_even(bounded)) - static_cast<int32_t>(low));
  }
}

// Sums in kLanes parallel lanes joined in a fixed order: the same figure for any compiler and vector width.
WeightError group_error(const float* given, int64_t count, float scale, int offset, const uint8_t* codes) {
  constexpr int kLanes = 8;
  double signal[kLanes] = {}, noise[kLanes] = {};
  float largest = 0;
  const auto add = [&](int64_t i, int lanes) {
    float difference[kLanes] = {}, value[kLanes] = {};
    for (int lane = 0; lane < lanes; ++lane) {
      value[lane] = given[i + lane];
      difference[lane] = std::fabs(static_cast<float>(codes[i + lane] - offset) * scale - value[lane]);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      signal[lane] += static_cast<double>(value[lane]) * static_cast<double>(value[lane]);
      noise[lane] += static_cast<double>(difference[lane]) * static_cast<double>(difference[lane]);
    }
    for (int lane = 0; lane < kLanes; ++lane) largest = std::max(largest, difference[lane]);
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) add(i, kLanes);
  if (i < count) add(i, static_cast<int>(count - i));
  WeightError error{.largest = largest, .weights = count};
  for (int lane = 0; lane < kLanes; ++lane) error.add({.signal = signal[lane], .noise = noise[lane]});
  return error;
}

// codes: [k rounded up to a whole word], zeros behind k.
void pack_row(const uint8_t* codes, int64_t words, int bits, uint32_t* packed) {
  if (bits == 8) {
    for (int64_t i = 0; i < words; ++i) {
      const uint8_t* c = codes + 4 * i;
      packed[i] = static_cast<uint32_t>(c[0]) | static_cast<uint32_t>(c[1]) << 8 |
                  static_cast<uint32_t>(c[2]) << 16 | static_cast<uint32_t>(c[3]) << 24;
    }
    return;
  }
  for (int64_t i = 0; i < words; ++i) {
    uint32_t word = 0;
    for (int j = 0; j < 8; ++j) word |= static_cast<uint32_t>(codes[8 * i + j]) << (4 * j);
    packed[i] = word;
  }
}

struct Block {
  int64_t rows, k;
  const float* values;
  int64_t stride;
  uint32_t* packed;
  std::byte* scales;
  int64_t first;
};

template <class T>
[[noreturn, gnu::cold]] void fail_not_finite(const float* row, const Block& block, int64_t index,
                                             std::string_view name, Dtype type) {
  int64_t column = 0;
  while (column + 1 < block.k && is_finite(row[column]) && is_finite(T::round(row[column]))) ++column;
  fail("{}: row {}, column {} is {}, not a finite {}", name, block.first + index, column, row[column],
       name_of(type));
}

template <class T>
void quantise_block(const PackedSpec& spec, const Block& block, WeightError& error, std::string_view name) {
  const int64_t words = spec.words(block.k), groups = spec.groups(block.k);
  const int64_t length = spec.group == 0 ? block.k : spec.group;
  const int offset = 1 << (spec.bits - 1);
  const auto low = static_cast<float>(-offset), high = static_cast<float>(offset - 1);
  const float half_range = (high - low) / 2;
  std::vector<float> rounded(static_cast<size_t>(block.k));
  std::vector<uint8_t> codes(static_cast<size_t>(words) * 32 / static_cast<size_t>(spec.bits));
  for (int64_t r = 0; r < block.rows; ++r) {
    const float* row = block.values + r * block.stride;
    if (round_row<T>(row, block.k, rounded.data()) >= kInf)
      fail_not_finite<T>(row, block, r, name, spec.type);
    for (int64_t g = 0; g < groups; ++g) {
      const float* values = rounded.data() + g * length;
      float scale = T::round(largest_magnitude(values, length) / half_range);
      if (scale == 0) scale = T::kEps;
      T::store(scale, block.scales + static_cast<size_t>(r * groups + g) * spec.scale_bytes());
      uint8_t* out = codes.data() + g * length;
      quantise_group<T>(values, length, scale, low, high, out);
      error.add(group_error(row + g * length, length, scale, offset, out));
    }
    pack_row(codes.data(), words, spec.bits, block.packed + r * words);
  }
}

// The usual sizes that divide k, as text.
std::string dividing_groups(int64_t k) {
  std::string out;
  for (const int group : usual_group_sizes())
    if (k % group == 0) out += text_of(out.empty() ? "{}" : ", {}", group);
  return out;
}

}  // namespace

std::vector<int> usual_group_sizes() { return group_sizes(packed_format({.bits = 4})); }

std::string usual_group_text() {
  const std::vector<int> sizes = usual_group_sizes();
  std::string out;
  for (size_t i = 0; i < sizes.size(); ++i)
    out += text("{}{}", i == 0 ? "" : i + 1 < sizes.size() ? ", " : " or ", sizes[i]);
  return out;
}

void check_packed(const PackedSpec& spec, int64_t n, int64_t k, std::string_view name) {
  if (spec.bits != 4 && spec.bits != 8) fail("{}: {} bits; packed weights have 4 or 8", name, spec.bits);
  if (spec.type != Dtype::kBf16 && spec.type != Dtype::kF16 && spec.type != Dtype::kF32)
    fail("{}: scales in {}; packed weights have BF16, F16 or F32", name, name_of(spec.type));
  if (n < 1 || k < 1) fail("{}: [{}, {}] has no elements", name, n, k);
  checked_mul(checked_mul(n, k, name), int64_t{8}, name);
  if (spec.group < 0) fail("{}: group size {}", name, spec.group);
  if (spec.group == 0 || k % spec.group == 0) return;
  const std::string sizes = dividing_groups(k);
  fail("{}: group size {} does not divide its {} columns; {}-1 (one scale per row) does", name, spec.group, k,
       sizes.empty() ? "" : sizes + " or ");
}

void quantise_packed_rows(const PackedSpec& spec, int64_t rows, int64_t k, const float* values,
                          int64_t stride, uint32_t* packed, std::byte* scales, WeightError& error,
                          std::string_view name, int64_t first) {
  if (rows == 0) return;
  check_packed(spec, rows, k, name);
  const Block block{rows, k, values, stride, packed, scales, first};
  if (spec.type == Dtype::kBf16) return quantise_block<InBf16>(spec, block, error, name);
  if (spec.type == Dtype::kF16) return quantise_block<InF16>(spec, block, error, name);
  quantise_block<InF32>(spec, block, error, name);
}

Format packed_format(const PackedSpec& spec) {
  const Scale scale = spec.type == Dtype::kF16   ? Scale::kF16
                      : spec.type == Dtype::kF32 ? Scale::kF32
                                                 : Scale::kBf16;
  const bool four = spec.bits == 4;
  return {four ? Code::kU4 : Code::kI8, four ? 8 : 0, scale, Min::kNone, {.k = static_cast<int>(spec.group)}};
}

Format packed_read_format(Format format) {
  const bool narrow = format.scale == Scale::kF16 || format.scale == Scale::kBf16;
  const bool taken = format.scale == Scale::kBf16 && format.span.k % 64 == 0;
  if (format.code == Code::kI8 && narrow && !taken) format.scale = Scale::kF32;
  return format;
}

Matrix round_packed(const PackedSpec& spec, int64_t n, int64_t k, const float* values, std::string_view name,
                    int64_t first) {
  Matrix out(packed_format(spec), n, k);
  const int64_t words = spec.words(k);
  std::vector<uint32_t> packed(static_cast<size_t>(words));
  WeightError ignored;
  const auto scale_row = static_cast<size_t>(spec.groups(k)) * spec.scale_bytes();
  for (int64_t row = 0; row < n; ++row) {
    quantise_packed_rows(
        spec, 1, k, values + row * k, k, packed.data(),
        reinterpret_cast<std::byte*>(out.scales.data()) + static_cast<size_t>(row) * scale_row, ignored, name,
        first + row);
    uint8_t* codes = out.codes.data() + row * k;
    for (int64_t i = 0; i < k; ++i) {
      const auto at = static_cast<size_t>(i * spec.bits);
      const uint32_t code = packed[at / 32] >> (at % 32) & ((1u << spec.bits) - 1);
      codes[i] = static_cast<uint8_t>(spec.bits == 4 ? code : code ^ 0x80);
    }
  }
  return out;
}

namespace {

template <class T>
void pack_as(const PackedSpec& spec, const MatrixView& matrix, const float* values, uint32_t* packed,
             std::byte* scales, WeightError& error) {
  const int64_t words = spec.words(matrix.k), groups = spec.groups(matrix.k), length = matrix.k / groups;
  std::vector<uint8_t> codes(static_cast<size_t>(words) * 32 / static_cast<size_t>(spec.bits));
  for (int64_t row = 0; row < matrix.n; ++row) {
    const uint8_t* from = matrix.codes + row * matrix.k;
    for (int64_t i = 0; i < matrix.k; ++i)
      codes[static_cast<size_t>(i)] = static_cast<uint8_t>(spec.bits == 4 ? from[i] : from[i] ^ 0x80);
    for (int64_t g = 0; g < groups; ++g) {
      const float scale = scale_at(matrix, row, g * length);
      T::store(scale == 0 ? T::kEps : scale,
               scales + static_cast<size_t>(row * groups + g) * spec.scale_bytes());
      error.add(group_error(values + row * matrix.k + g * length, length, scale, 1 << (spec.bits - 1),
                            codes.data() + g * length));
    }
    pack_row(codes.data(), words, spec.bits, packed + row * words);
  }
}

}  // namespace

void pack_matrix(const PackedSpec& spec, const MatrixView& matrix, const float* values, uint32_t* packed,
                 std::byte* scales, WeightError& error) {
  KT_CHECK(matrix.format == packed_format(spec), "a matrix in {}", name_of(matrix.format));
  if (spec.type == Dtype::kBf16) return pack_as<InBf16>(spec, matrix, values, packed, scales, error);
  if (spec.type == Dtype::kF16) return pack_as<InF16>(spec, matrix, values, packed, scales, error);
  pack_as<InF32>(spec, matrix, values, packed, scales, error);
}

}  // namespace kt::inline weights
