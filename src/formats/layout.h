// The packed order of weights: what the packer writes and every kernel walks. No intrinsics here.
//
// Rows are taken in blocks of 16. A row block is a sequence of records; a record is a header (super-block
// factors, scales, mins: 16 of each side by side) followed by the codes of `record_k` columns, so that one
// row block is one forward stream of bytes. Codes come in chunks of 64 columns; K is padded to chunks with
// zero codes, which meet activations that are zero there. Padding rows have zero scales.
//
// Inside a chunk, columns are taken in steps. A step holds `step_k` consecutive columns of each of the 16 rows:
//
//   byte(row, k) = (k / step_k) * 16 * step_bytes + row * step_bytes + (k % step_k) * code bytes
//
// With integer and bf16 codes a step is `Fragment::step_bytes` wide, the width the CPU's dot products take
// (16 rows x 4 bytes: VNNI and the AMX B tile; 8 x (2 rows x 8 bytes): SMMLA). The other float codes have
// steps of one column, so that 16 rows widen side by side.
// E4M3 codes on 4-byte fragments have steps of 4 columns as well, in pairs of columns: every 16 bytes are columns 0 and
// 1 of 4 rows, then columns 2 and 3 of the same:
//
//   byte in step = row / 4 * 16 + k / 2 % 2 * 8 + row % 4 * 2 + k % 2
//
// so that interleaving two look-ups of a step (low and high bytes) within 16 bytes gives two steps of bf16 codes. Codes
// of fewer than 8 bits are split into planes of 4, 2 and 1 bits; in a plane of b bits, 8/b consecutive steps share
// their bytes, the earlier step in the lower bits: expanding is a shift and a mask.
// Codes of a grid are what checkpoints store, an index for several columns: a chunk is [low bytes of the indices][their
// high bits][a sign bit for each column], whose order grid_low, grid_high and grid_sign give: the indices of four
// groups of columns stand 4 rows by 4 groups in 16 bytes; of eight steps of signs each has a bit of every byte, which
// stand in the order of a step's.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "formats/format.h"

namespace kt::inline formats {

inline constexpr int kBlockRows = 16;
inline constexpr int kChunk = 64;
inline constexpr int kMaxSpan = 65536;  // 255 * 127 * 65536 < 2^31

enum class SpanLength : uint8_t { k16, k32, kLong };  // kLong: a multiple of 64 columns, or the whole row

// What a kernel must know at compile time. Few layouts serve many formats.
struct Layout {
  Code code;
  Scale scale;
  Min min;
  SpanLength span;
  bool operator==(const Layout&) const = default;
};

inline constexpr auto kLayouts = std::to_array<Layout>({
    {Code::kI8, Scale::kF32, Min::kNone, SpanLength::kLong},
    {Code::kI8, Scale::kF32, Min::kNone, SpanLength::k32},
    {Code::kI8, Scale::kBf16, Min::kNone, SpanLength::kLong},
    {Code::kI8, Scale::kF16, Min::kNone, SpanLength::k32},
    {Code::kU4, Scale::kF32, Min::kNone, SpanLength::kLong},
    {Code::kU4, Scale::kF32, Min::kNone, SpanLength::k32},
    {Code::kU4, Scale::kBf16, Min::kNone, SpanLength::kLong},
    {Code::kU4, Scale::kBf16, Min::kNone, SpanLength::k32},
    {Code::kU4, Scale::kF16, Min::kNone, SpanLength::kLong},
    {Code::kU4, Scale::kF16, Min::kNone, SpanLength::k32},
    {Code::kU4, Scale::kBf16, Min::kZero, SpanLength::kLong},
    {Code::kU4, Scale::kBf16, Min::kZero, SpanLength::k32},
    {Code::kU4, Scale::kF16, Min::kZero, SpanLength::kLong},
    {Code::kU4, Scale::kF16, Min::kZero, SpanLength::k32},
    {Code::kU4, Scale::kF16, Min::kF16, SpanLength::k32},
    {Code::kU5, Scale::kF16, Min::kNone, SpanLength::k32},
    {Code::kU5, Scale::kF16, Min::kF16, SpanLength::k32},
    {Code::kU2, Scale::kS8F16, Min::kS8F16, SpanLength::k16},
    {Code::kU3, Scale::kS8F16, Min::kNone, SpanLength::k16},
    {Code::kU4, Scale::kS8F16, Min::kS8F16, SpanLength::k32},
    {Code::kU5, Scale::kS8F16, Min::kS8F16, SpanLength::k32},
    {Code::kU6, Scale::kS8F16, Min::kNone, SpanLength::k16},
    {Code::kIq4, Scale::kF16, Min::kNone, SpanLength::k32},
    {Code::kIq4, Scale::kS8F16, Min::kNone, SpanLength::k32},
    {Code::kE4m3, Scale::kF32, Min::kNone, SpanLength::kLong},
    {Code::kE4m3, Scale::kE8m0, Min::kNone, SpanLength::k32},
    {Code::kE2m1, Scale::kE8m0, Min::kNone, SpanLength::k32},
    {Code::kBf16, Scale::kNone, Min::kNone, SpanLength::kLong},
    {Code::kF16, Scale::kNone, Min::kNone, SpanLength::kLong},
    {Code::kF32, Scale::kNone, Min::kNone, SpanLength::kLong},
    {Code::kIq2Xxs, Scale::kS8F16, Min::kNone, SpanLength::k32},
    {Code::kIq2Xs, Scale::kS8F16, Min::kNone, SpanLength::k16},
    {Code::kIq2S, Scale::kS8F16, Min::kNone, SpanLength::k16},
    {Code::kIq3Xxs, Scale::kS8F16, Min::kNone, SpanLength::k32},
    {Code::kIq3S, Scale::kS8F16, Min::kNone, SpanLength::k32},
    {Code::kIq1, Scale::kS8F16, Min::kNone, SpanLength::k32},
    {Code::kIq1, Scale::kS8F16, Min::kNone, SpanLength::k16},
    {Code::kE2m1, Scale::kE4m3, Min::kNone, SpanLength::k16},
    {Code::kE2m1, Scale::kF32, Min::kNone, SpanLength::k16},
});
inline constexpr int kLayoutCount = static_cast<int>(kLayouts.size());

// What the packing must know of the CPU family; a constant of each kernel table.
struct Fragment {
  int step_bytes;       // bytes one row contributes to a dot-product step: 4 or 8
  bool unsigned_bytes;  // 8-bit signed codes are stored with 128 added (the dot product takes u8 x s8)
  bool operator==(const Fragment&) const = default;
};

constexpr int packed_code_bytes(Code code) {
  return code == Code::kF32 ? 4 : code == Code::kF16 || code == Code::kBf16 ? 2 : 1;
}
// Whether codes stand in pairs of columns (above).
constexpr bool in_pairs(Code code, int fragment_step_bytes) {
  return code == Code::kE4m3 && fragment_step_bytes == 4;
}
constexpr int step_bytes(Code code, int fragment_step_bytes) {
  const bool dots = is_integer(code) || code == Code::kBf16 || in_pairs(code, fragment_step_bytes);
  return dots ? fragment_step_bytes : packed_code_bytes(code);
}
constexpr int step_columns(Code code, int fragment_step_bytes) {
  return step_bytes(code, fragment_step_bytes) / packed_code_bytes(code);
}
// Where row `row` of the block and column `k` of a step stand in the step: the sum of the two.
constexpr int row_byte(Code code, int fragment_step_bytes, int row) {
  return in_pairs(code, fragment_step_bytes) ? row / 4 * 16 + row % 4 * 2
                                             : row * step_bytes(code, fragment_step_bytes);
}
constexpr int column_byte(Code code, int fragment_step_bytes, int k) {
  return in_pairs(code, fragment_step_bytes) ? k / 2 * 8 + k % 2 : k * packed_code_bytes(code);
}

// Bits of the two planes a sub-byte code is split into (0: none). Whole bytes have no planes.
struct Planes {
  int low, high;
};
constexpr Planes planes(Code code) {
  switch (code_bits(code)) {
    case 2:
      return {2, 0};
    case 3:
      return {2, 1};
    case 4:
      return {4, 0};
    case 5:
      return {4, 1};
    case 6:
      return {4, 2};
    default:
      return {0, 0};
  }
}

// Where the parts of a chunk of a grid's codes begin, and where it ends.
struct GridPlanes {
  int high, signs, bytes;
};
constexpr GridPlanes grid_planes(Code code) {
  const Grid grid = grid_of(code);
  const int indices = kBlockRows * kChunk / grid.numbers, signs = indices + indices * grid.high_bits / 8;
  return {indices, signs, signs + (grid.signs ? kBlockRows * kChunk / 8 : 0)};
}
// The low byte of the index of columns [numbers * group, numbers * (group + 1)) of a chunk; its high bits, the first of
// them; a column's sign.
struct BitPlace {
  int byte, shift;
};
constexpr int grid_low(int group, int row) { return group / 4 * 64 + row / 4 * 16 + group % 4 * 4 + row % 4; }
constexpr BitPlace grid_high(Code code, int group, int row) {
  const int bits = grid_of(code).high_bits, sharing = 8 / bits;
  return {grid_planes(code).high + group / sharing * kBlockRows + row, group % sharing * bits};
}
constexpr BitPlace grid_sign(Code code, int step_k, int row, int column) {
  const int step = column / step_k, at = (step / 8 * kBlockRows + row) * step_k + column % step_k;
  return {grid_planes(code).signs + at, step % 8};
}

constexpr int chunk_bytes(Code code) {
  return is_grid(code) ? grid_planes(code).bytes : kBlockRows * kChunk * code_bits(code) / 8;
}
constexpr int low_plane_bytes(Code code) { return kBlockRows * kChunk * planes(code).low / 8; }

constexpr int span_columns(SpanLength span) { return span == SpanLength::k16 ? 16 : 32; }  // of short spans

// Where the scale, min and super-block factors of a record stand, for `spans` spans a record.
struct Header {
  int supers = 0, super_mins = 0, scales = 0, mins = 0, bytes = 0;
};
constexpr Header header_of(const Layout& layout, int spans_per_record) {
  Header h;
  int at = 0;
  if (layout.scale == Scale::kS8F16) at += kBlockRows * 2;
  h.super_mins = at;
  if (layout.min == Min::kS8F16) at += kBlockRows * 2;
  if (at) at = (at + 63) / 64 * 64;
  h.scales = at;
  at += kBlockRows * scale_bytes(layout.scale) * spans_per_record;
  h.mins = at;
  at += kBlockRows * min_bytes(layout.min) * spans_per_record;
  h.bytes = (at + 63) / 64 * 64;
  return h;
}

}  // namespace kt::inline formats
