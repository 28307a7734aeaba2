// Quantising and unpacking in one pass over groups of four rows: sixteen columns of four rows are a 4 x 4
// matrix of 32-bit words, which the tile order wants transposed. Vectors are the compiler's generic ones, 16
// bytes wide, so that the same source is fast on every baseline.
#include "weights/kt/kt_layout.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "formats/floats.h"

namespace kt::inline weights {
namespace {

using F4 = float __attribute__((vector_size(16)));
using I4 = int32_t __attribute__((vector_size(16)));
using B16 = uint8_t __attribute__((vector_size(16)));

constexpr int64_t kColumnBlock = 3584;  // columns of a K block
constexpr int kHalf = 1024;             // bytes of 16 rows of a tile
constexpr int kGroup = kKtRowGroup;     // rows taken together
constexpr int kStep = 16;               // columns taken together

constexpr int row_block(int bits) { return bits == 4 ? 128 : 64; }  // N_BLOCK
constexpr int granule(int bits) { return bits == 4 ? 128 : 64; }    // columns of a tile

template <class V, class T>
V load(const T* from) {
  V out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

template <class V, class T>
void store(T* to, V value) {
  std::memcpy(to, &value, sizeof value);
}

// Byte offset of the tile of rows [row, row + 32), columns [column, column + granule) of the padded matrix.
int64_t tile_at(const KtShape& shape, int64_t row, int64_t column) {
  const int64_t block_row = row / row_block(shape.bits) * row_block(shape.bits);
  const int64_t block_rows = std::min<int64_t>(row_block(shape.bits), shape.n_pad - block_row);
  const int64_t block_column = column / kColumnBlock * kColumnBlock;
  const int64_t block_columns = std::min(kColumnBlock, shape.k_pad - block_column);
  const int64_t element = block_row * shape.k_pad + block_column * block_rows +
                          (row - block_row) * block_columns + (column - block_column) * kKtRowStep;
  return element * shape.bits / 8;
}

// Four rows of four 32-bit words each: rows become columns.
void transpose(std::array<B16, kGroup>& rows) {
  const I4 a = std::bit_cast<I4>(rows[0]), b = std::bit_cast<I4>(rows[1]);
  const I4 c = std::bit_cast<I4>(rows[2]), d = std::bit_cast<I4>(rows[3]);
  const I4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const I4 ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const I4 cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const I4 cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  rows[0] = std::bit_cast<B16>(__builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5));
  rows[1] = std::bit_cast<B16>(__builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7));
  rows[2] = std::bit_cast<B16>(__builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5));
  rows[3] = std::bit_cast<B16>(__builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7));
}

// The low byte of every 32-bit lane.
B16 low_bytes(const std::array<I4, 4>& lanes) {
  const auto even = [](B16 a, B16 b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  };
  return even(even(std::bit_cast<B16>(lanes[0]), std::bit_cast<B16>(lanes[1])),
              even(std::bit_cast<B16>(lanes[2]), std::bit_cast<B16>(lanes[3])));
}

// What a row is multiplied by, and what that lost so far in units of the stored scale's step. Sums run in
// four f32 lanes (at most a few thousand terms each) and are added to doubles row by row.
struct Row {
  const float* values = nullptr;
  F4 reciprocal{};
  F4 signal{}, noise{};
  I4 largest{};  // bits of a magnitude, which order as integers
};

enum class Codes { kInt8, kInt4, kInt4Direct };

// Sixteen codes in the low bits of bytes. |value * reciprocal| < 2^22, so that adding kMagic leaves the
// rounded integer in the low mantissa bits, two's complement.
template <Codes kCodes>
[[gnu::always_inline]] inline B16 encode(Row& row, const float* values) {
  constexpr float kMagic = 12582912.0f;
  constexpr int32_t kMagicBits = 0x4B400000;
  std::array<I4, 4> lanes;
  for (size_t i = 0; i < lanes.size(); ++i) {
    const F4 scaled = load<F4>(values + 4 * i) * row.reciprocal;
    const F4 shifted = scaled + kMagic;
    F4 rounded = shifted - kMagic;
    lanes[i] = std::bit_cast<I4>(shifted);
    if constexpr (kCodes == Codes::kInt4) {
      const I4 eight = lanes[i] - kMagicBits;
      const I4 sign = eight >> 31;
      const I4 magnitude = (((eight ^ sign) - sign) + 8) & 0xF0;
      const I4 code = (magnitude ^ sign) - sign;
      lanes[i] = code >> 4;
      rounded = __builtin_convertvector(code, F4);
    }
    const F4 lost = rounded - scaled;
    const I4 magnitude = std::bit_cast<I4>(lost) & 0x7FFFFFFF;
    row.largest = magnitude > row.largest ? magnitude : row.largest;
    row.noise += lost * lost;
    row.signal += scaled * scaled;
  }
  return low_bytes(lanes);
}

// Columns [column, column + 16) of four rows as the words the tile wants; int4 takes [column + 64, ...) too.
template <Codes kCodes>
[[gnu::always_inline]] inline void encode_group(std::array<Row, kGroup>& rows, int64_t column,
                                                std::byte* out) {
  std::array<B16, kGroup> words;
  for (size_t i = 0; i < kGroup; ++i) {
    words[i] = encode<kCodes>(rows[i], rows[i].values + column);
    if constexpr (kCodes != Codes::kInt8)
      words[i] = (words[i] & 0x0F) | (encode<kCodes>(rows[i], rows[i].values + column + 64) << 4);
  }
  transpose(words);
  for (size_t i = 0; i < kGroup; ++i) store(out + 64 * i, words[i]);
}

// Columns [first, last) of four rows, whole granules of one K block. `values` of a row start at column first.
template <Codes kCodes>
void encode_columns(std::array<Row, kGroup>& shared, int64_t columns, std::byte* tile) {
  constexpr int kGranule = kCodes == Codes::kInt8 ? 64 : 128;
  std::array<Row, kGroup> rows = shared;  // a copy that lives in registers
  for (int64_t column = 0; column < columns; column += kGranule, tile += 2 * kHalf)
    for (int step = 0; step < 64; step += kStep)
      encode_group<kCodes>(rows, column + step, tile + step / 4 * 64);
  shared = rows;
}

void encode_columns(Codes codes, std::array<Row, kGroup>& rows, int64_t columns, std::byte* tile) {
  switch (codes) {
    case Codes::kInt8:
      return encode_columns<Codes::kInt8>(rows, columns, tile);
    case Codes::kInt4:
      return encode_columns<Codes::kInt4>(rows, columns, tile);
    case Codes::kInt4Direct:
      return encode_columns<Codes::kInt4Direct>(rows, columns, tile);
  }
}

// The largest magnitude of a row, as bits: integers, so that the compiler may take it in any order and a
// value that is not finite cannot hide.
int32_t largest_bits(const float* values, int64_t k) {
  I4 lanes[4] = {};
  int64_t column = 0;
  for (; column + kStep <= k; column += kStep) {
    for (int i = 0; i < 4; ++i) {
      const I4 bits = load<I4>(values + column + 4 * i) & 0x7FFFFFFF;
      lanes[i] = bits > lanes[i] ? bits : lanes[i];
    }
  }
  int32_t out = 0;
  for (; column < k; ++column) out = std::max(out, std::bit_cast<int32_t>(values[column]) & 0x7FFFFFFF);
  for (const I4& lane : lanes)
    for (int i = 0; i < 4; ++i) out = std::max<int32_t>(out, lane[i]);
  return out;
}

// As in formats/: beyond it, a value rounded up to the next code can be infinite.
constexpr float kLargestValue = 0x1p127f;

[[noreturn, gnu::cold]] void refuse_value(const float* values, int64_t k, int64_t row,
                                          std::string_view name) {
  int64_t column = 0;
  while (column + 1 < k && std::fabs(values[column]) <= kLargestValue) ++column;
  if (!is_finite(values[column])) fail("{}: row {}, column {} is not a finite number", name, row, column);
  fail("{}: row {}, column {}: {} is beyond {}, the largest value that can be stored", name, row, column,
       values[column], kLargestValue);
}

// One group of at most four rows on its way into the file.
struct Group {
  Codes codes;
  int64_t first = 0;  // row of the part
  int64_t count = 0;  // rows that exist, 0 to 4
  const float* values = nullptr;
  int64_t stride = 0;
  std::string_view name;
};

// The stored scale of a row with this largest magnitude.
float stored_scale(Codes codes, float amax) {
  return codes == Codes::kInt8 ? amax * (1.0f / 127) : amax / 112;
}

// What the error sums of a row are in units of.
float unit_of(Codes codes, float scale) { return codes == Codes::kInt4Direct ? 16 * scale : scale; }

// Values so small that the reciprocal of their scale is infinite: divided here instead, and saturated.
const float* divide_row(Codes codes, const float* values, int64_t k, float unit, std::vector<float>& out) {
  const float limit = codes == Codes::kInt8 ? 127.0f : codes == Codes::kInt4 ? 112.0f : 7.0f;
  out.resize(static_cast<size_t>(k));
  for (int64_t i = 0; i < k; ++i) out[static_cast<size_t>(i)] = std::clamp(values[i] / unit, -limit, limit);
  return out.data();
}

void add_error(const Row& row, float unit, int64_t k, WeightError& error) {
  double signal = 0, noise = 0;
  int32_t largest = 0;
  for (int i = 0; i < 4; ++i) {
    signal += static_cast<double>(row.signal[i]);
    noise += static_cast<double>(row.noise[i]);
    largest = std::max<int32_t>(largest, row.largest[i]);
  }
  const auto scale = static_cast<double>(unit);
  error.add({.signal = signal * scale * scale,
             .noise = noise * scale * scale,
             .largest = static_cast<double>(std::bit_cast<float>(largest)) * scale,
             .weights = k});
}

// Walks the K blocks of a row: encode(first column, columns, its first tile) for whole granules, then the
// columns that need padding from a copy that has it.
void encode_rows(const KtShape& shape, Codes codes, int64_t row, std::array<Row, kGroup>& rows,
                 std::span<std::byte> packed) {
  const int64_t block_first = row / kKtRowStep * kKtRowStep;
  const int64_t inside = (row - block_first) / 16 * kHalf + row % 16 * 4;
  const int64_t whole = shape.k / granule(shape.bits) * granule(shape.bits);
  std::array<const float*, kGroup> starts;
  for (size_t i = 0; i < kGroup; ++i) starts[i] = rows[i].values;
  for (int64_t column = 0; column < whole; column += kColumnBlock) {
    for (size_t i = 0; i < kGroup; ++i) rows[i].values = starts[i] + column;
    encode_columns(codes, rows, std::min(kColumnBlock, whole - column),
                   packed.data() + tile_at(shape, block_first, column) + inside);
  }
  if (whole == shape.k_pad) return;
  std::array<std::array<float, 128>, kGroup> tails{};
  for (size_t i = 0; i < kGroup; ++i) {
    std::copy(starts[i] + whole, starts[i] + shape.k, tails[i].begin());
    rows[i].values = tails[i].data();
  }
  encode_columns(codes, rows, granule(shape.bits),
                 packed.data() + tile_at(shape, block_first, whole) + inside);
}

void quantise_group(const KtShape& shape, const Group& group, std::span<std::byte> packed,
                    std::span<float> scales, WeightError& error) {
  std::array<Row, kGroup> rows;
  std::array<float, kGroup> units{};
  std::array<std::vector<float>, kGroup> divided;
  for (int64_t i = 0; i < kGroup; ++i) {
    Row& row = rows[static_cast<size_t>(i)];
    float& scale = scales[static_cast<size_t>(group.first + i)];
    // A padding row multiplies the first one's values by zero.
    row.values = i < group.count ? group.values + i * group.stride : group.values;
    scale = 0;
    if (i >= group.count) continue;
    const float amax = std::bit_cast<float>(largest_bits(row.values, shape.k));
    if (!(amax <= kLargestValue)) refuse_value(row.values, shape.k, group.first + i, group.name);
    scale = stored_scale(group.codes, amax);
    if (scale == 0) continue;  // a row of zeros, or of nothing a scale can reach
    const float unit = units[static_cast<size_t>(i)] = unit_of(group.codes, scale);
    float reciprocal = group.codes == Codes::kInt4Direct ? 7 / amax : 1 / scale;
    if (!is_finite(reciprocal)) {
      row.values = divide_row(group.codes, row.values, shape.k, unit, divided[static_cast<size_t>(i)]);
      reciprocal = 1;
    }
    row.reciprocal = F4{} + reciprocal;
  }
  encode_rows(shape, group.codes, group.first, rows, packed);
  for (int64_t i = 0; i < group.count; ++i)
    add_error(rows[static_cast<size_t>(i)], units[static_cast<size_t>(i)], shape.k, error);
}

// A group of four rows inside a half tile: columns [0, 16 * 4) of words to four rows of plain codes.
template <int kBits>
void unpack_tile(const std::byte* from, int64_t columns, uint8_t* out, int64_t stride) {
  for (int step = 0; step < 64; step += kStep) {
    std::array<B16, kGroup> words;
    for (size_t i = 0; i < kGroup; ++i) words[i] = load<B16>(from + step * 16 + 64 * i);
    transpose(words);
    for (int half = 0; half < (kBits == 4 ? 2 : 1); ++half) {
      const int64_t column = step + 64 * half;
      const int64_t wanted = std::min<int64_t>(kStep, columns - column);
      if (wanted <= 0) break;
      for (size_t i = 0; i < kGroup; ++i) {
        B16 codes = words[i];
        if constexpr (kBits == 4) codes = ((half ? codes >> 4 : codes & 0x0F) ^ 8);
        uint8_t* to = out + static_cast<int64_t>(i) * stride + column;
        if (wanted == kStep)
          store(to, codes);
        else
          std::memcpy(to, &codes, static_cast<size_t>(wanted));
      }
    }
  }
}

// Rows of one block of 32: [first, last) of them, columns tile by tile so that each tile is read once.
template <int kBits>
void unpack_block(const KtShape& shape, const std::byte* packed, int64_t block, int64_t first, int64_t last,
                  uint8_t* out, int64_t stride) {
  constexpr int64_t kTile = granule(kBits);
  for (int64_t column = 0; column < shape.k; column += kTile) {
    const std::byte* tile = packed + tile_at(shape, block, column);
    const int64_t columns = std::min(kTile, shape.k - column);
    for (int64_t row = first / kGroup * kGroup; row < last; row += kGroup) {
      const std::byte* from = tile + row / 16 * kHalf + row % 16 * 4;
      if (row >= first && row + kGroup <= last) {
        unpack_tile<kBits>(from, columns, out + (row - first) * stride + column, stride);
        continue;
      }
      uint8_t four[kGroup][128];
      unpack_tile<kBits>(from, columns, four[0], 128);
      for (int64_t i = std::max(row, first); i < std::min(row + kGroup, last); ++i)
        std::memcpy(out + (i - first) * stride + column, four[i - row], static_cast<size_t>(columns));
    }
  }
}

}  // namespace

KtShape kt_shape(int bits, int64_t n, int64_t k) {
  if (bits != 4 && bits != 8) fail("kt weights of {} bits: expected 4 or 8", bits);
  constexpr int64_t kMost = int64_t{1} << 31;
  if (n < 1 || k < 1 || n > kMost || k > kMost) fail("kt weights of {} x {}: no such matrix", n, k);
  KtShape out{.bits = bits, .n = n, .k = k};
  out.n_pad = round_up(n, kKtRowStep);
  out.k_pad = round_up(k, granule(bits));
  const auto elements = static_cast<size_t>(checked_mul(out.n_pad, out.k_pad, "kt weights"));
  out.weight_bytes = bits == 4 ? elements / 2 : elements;
  out.scale_bytes = static_cast<size_t>(out.n_pad) * sizeof(float);
  return out;
}

void kt_quantise_rows(const KtShape& shape, Rounding rounding, int64_t first, int64_t count,
                      const float* values, int64_t stride, std::span<std::byte> packed,
                      std::span<float> scales, WeightError& error, std::string_view name) {
  KT_CHECK(first >= 0 && count >= 0 && first % kGroup == 0 && first + count <= shape.n &&
               (count % kGroup == 0 || first + count == shape.n),
           "{}: rows {} + {} of {}", name, first, count, shape.n);
  KT_CHECK(packed.size() == shape.weight_bytes && scales.size_bytes() == shape.scale_bytes, "{}: {} and {}",
           name, packed.size(), scales.size());
  const Codes codes = shape.bits == 8                      ? Codes::kInt8
                      : rounding == Rounding::kEstablished ? Codes::kInt4
                                                           : Codes::kInt4Direct;
  const int64_t last = first + count == shape.n ? shape.n_pad : first + count;
  for (int64_t row = 0; count > 0 && first + row < last; row += kGroup) {
    const int64_t rows = std::clamp<int64_t>(count - row, 0, kGroup);
    const Group group{.codes = codes,
                      .first = first + row,
                      .count = rows,
                      .values = values + (rows > 0 ? row * stride : 0),
                      .stride = stride,
                      .name = name};
    quantise_group(shape, group, packed, scales, error);
  }
}

void kt_unpack_rows(const KtShape& shape, std::span<const std::byte> packed, int64_t first, int64_t count,
                    uint8_t* out, int64_t stride) {
  KT_CHECK(first >= 0 && count >= 0 && first + count <= shape.n && packed.size() == shape.weight_bytes,
           "rows {} + {} of {}, {} bytes", first, count, shape.n, packed.size());
  for (int64_t row = first; row < first + count;) {
    const int64_t block = row / kKtRowStep * kKtRowStep;
    const int64_t last = std::min(block + kKtRowStep, first + count);
    uint8_t* to = out + (row - first) * stride;
    if (shape.bits == 4)
      unpack_block<4>(shape, packed.data(), block, row - block, last - block, to, stride);
    else
      unpack_block<8>(shape, packed.data(), block, row - block, last - block, to, stride);
    row = last;
  }
}

}  // namespace kt::inline weights
