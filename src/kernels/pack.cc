#include "kernels/pack.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/checked.h"
#include "base/error.h"
#include "base/text.h"
#include "formats/floats.h"
#include "formats/grids.h"

namespace kt::inline kernels {
namespace {

// Where column k of a chunk goes: byte of row 0 and shift, for each plane (or the whole code in `low`).
struct Places {
  std::array<uint16_t, kChunk> low_byte, high_byte;
  std::array<uint8_t, kChunk> low_shift, high_shift;
};

void place_plane(Code code, int fragment_step_bytes, int bits, int base, std::array<uint16_t, kChunk>& byte,
                 std::array<uint8_t, kChunk>& shift) {
  const int sharing = bits < 8 ? 8 / bits : 1;  // steps whose codes share bytes
  const int step_k = step_columns(code, fragment_step_bytes),
            row_bytes = step_bytes(code, fragment_step_bytes);
  for (int k = 0; k < kChunk; ++k) {
    const int step = k / step_k;
    byte[k] = static_cast<uint16_t>(base + step / sharing * kBlockRows * row_bytes +
                                    column_byte(code, fragment_step_bytes, k % step_k));
    shift[k] = static_cast<uint8_t>(step % sharing * bits);
  }
}

Places places_of(Code code, int fragment_step_bytes) {
  Places p{};
  const Planes bits = planes(code);
  place_plane(code, fragment_step_bytes, bits.low ? bits.low : 8, 0, p.low_byte, p.low_shift);
  if (bits.high)
    place_plane(code, fragment_step_bytes, bits.high, low_plane_bytes(code), p.high_byte, p.high_shift);
  return p;
}

bool adds_128(const Packing& p) { return p.fragment.unsigned_bytes && p.format.code == Code::kI8; }

// One plane of a row of sub-byte codes, kWidth bits from bit `drop` on: 8 / kWidth steps share a word.
template <typename Word, int kWidth>
void pack_plane(const uint8_t* codes, int drop, int row_at, uint8_t* out) {
  constexpr int kWordBytes = sizeof(Word), kSharing = 8 / kWidth, kWords = kChunk / kWordBytes / kSharing;
  constexpr Word kMask = static_cast<Word>(static_cast<Word>(~Word{0}) / 0xFF * ((1u << kWidth) - 1));
#pragma GCC unroll 8
  for (int i = 0; i < kWords; ++i) {
    Word word = 0;
#pragma GCC unroll 8
    for (int j = 0; j < kSharing; ++j) {
      Word step;
      std::memcpy(&step, codes + (i * kSharing + j) * kWordBytes, kWordBytes);
      word = static_cast<Word>(word | static_cast<Word>((step >> drop & kMask) << (j * kWidth)));
    }
    std::memcpy(out + i * kBlockRows * kWordBytes + row_at, &word, kWordBytes);
  }
}

// The codes of one row of a chunk, whole chunks of 64 columns, moved a step at a time: a step's codes are one
// word, and the planes of sub-byte codes are shifts of whole words because no code reaches into the next
// byte.
template <typename Word>
void pack_row(Code code, const uint8_t* codes, int row_at, int step_stride, Word flip, uint8_t* chunk) {
  constexpr int kWordBytes = sizeof(Word);
  const int steps = kChunk * packed_code_bytes(code) / kWordBytes;
  const auto load = [&](int step) {
    Word word;
    std::memcpy(&word, codes + step * kWordBytes, kWordBytes);
    return word;
  };
  const Planes bits = planes(code);
  if (!bits.low) {
    for (int step = 0; step < steps; ++step) {
      const Word word = static_cast<Word>(load(step) ^ flip);
      std::memcpy(chunk + step * step_stride + row_at, &word, kWordBytes);
    }
    return;
  }
  const auto plane = [&](int width, int drop, uint8_t* out) {
    if (width == 4) {
      pack_plane<Word, 4>(codes, drop, row_at, out);
    } else if (width == 2) {
      pack_plane<Word, 2>(codes, drop, row_at, out);
    } else {
      pack_plane<Word, 1>(codes, drop, row_at, out);
    }
  };
  plane(bits.low, 0, chunk);
  if (bits.high) plane(bits.high, bits.low, chunk + low_plane_bytes(code));
}

// Codes in pairs of columns (layout.h): words of two bytes.
void pack_row_in_pairs(const uint8_t* codes, int row_at, uint8_t* chunk) {
  for (int k = 0; k < kChunk; k += 2)
    std::memcpy(chunk + k / 4 * 4 * kBlockRows + k / 2 % 2 * 8 + row_at, codes + k, 2);
}

// The 64 codes of one row of a chunk as indices of their grid and signs, added to zeroed bytes.
void pack_grid_row(const Packing& p, const uint8_t* codes, int row, uint8_t* chunk) {
  const Code code = p.format.code;
  const Grid grid = grid_of(code);
  for (int i = 0; i < kChunk / grid.numbers; ++i) {
    const int index = grid_index(code, codes + i * grid.numbers);
    KT_CHECK(index >= 0, "{}: no entry of the grid has codes {}, {} ...", name_of(p.format),
             codes[i * grid.numbers], codes[i * grid.numbers + 1]);
    chunk[grid_low(i, row)] = static_cast<uint8_t>(index);
    if (grid.high_bits == 0) continue;
    const BitPlace high = grid_high(code, i, row);
    chunk[high.byte] = static_cast<uint8_t>(chunk[high.byte] | (index >> 8) << high.shift);
  }
  for (int k = 0; grid.signs && k < kChunk; ++k) {
    const BitPlace sign = grid_sign(code, p.fragment.step_bytes, row, k);
    chunk[sign.byte] = static_cast<uint8_t>(chunk[sign.byte] | int{codes[k] < kGridBias} << sign.shift);
  }
}

// pack_grid_row backwards.
void unpack_grid_row(const Packing& p, const uint8_t* chunk, int row, uint8_t* codes) {
  const Code code = p.format.code;
  const Grid grid = grid_of(code);
  for (int i = 0; i < kChunk / grid.numbers; ++i) {
    int index = chunk[grid_low(i, row)];
    if (grid.high_bits) {
      const BitPlace high = grid_high(code, i, row);
      index |= (chunk[high.byte] >> high.shift & ((1 << grid.high_bits) - 1)) << 8;
    }
    look_up(code, index, codes + i * grid.numbers);
  }
  for (int k = 0; grid.signs && k < kChunk; ++k) {
    const BitPlace sign = grid_sign(code, p.fragment.step_bytes, row, k);
    if (chunk[sign.byte] >> sign.shift & 1) codes[k] = negated_code(codes[k]);
  }
}

void pack_codes(const Packing& p, const MatrixView& w, int64_t first_column, int64_t block, int column,
                std::byte* chunk) {
  const Code code = p.format.code;
  const int size = packed_code_bytes(code), step = step_bytes(code, p.fragment.step_bytes);
  const int columns = static_cast<int>(std::min<int64_t>(kChunk, p.k - column));
  const int64_t rows = std::min<int64_t>(kBlockRows, p.n - block * kBlockRows);
  const uint64_t flip = adds_128(p) ? 0x8080808080808080u : 0;
  auto* out = reinterpret_cast<uint8_t*>(chunk);
  // Padding: zero codes, which are 0x80 where 128 is added.
  if (rows < kBlockRows || is_grid(code)) std::memset(out, flip ? 0x80 : 0, chunk_bytes(code));
  for (int r = 0; r < rows; ++r) {
    const uint8_t* codes = w.codes + ((block * kBlockRows + r) * w.k + first_column + column) * size;
    std::array<uint8_t, kChunk * 4> padded;
    if (columns < kChunk) {
      padded.fill(0);
      std::memcpy(padded.data(), codes, static_cast<size_t>(columns * size));
      codes = padded.data();
    }
    const int row_at = row_byte(code, p.fragment.step_bytes, r), stride = kBlockRows * step;
    if (is_grid(code)) {
      pack_grid_row(p, codes, r, out);
    } else if (in_pairs(code, p.fragment.step_bytes)) {
      pack_row_in_pairs(codes, row_at, out);
    } else if (step == 8) {
      pack_row<uint64_t>(code, codes, row_at, stride, flip, out);
    } else if (step == 4) {
      pack_row<uint32_t>(code, codes, row_at, stride, static_cast<uint32_t>(flip), out);
    } else if (step == 2) {
      pack_row<uint16_t>(code, codes, row_at, stride, 0, out);
    } else {
      pack_row<uint8_t>(code, codes, row_at, stride, 0, out);
    }
  }
}

float plain_scale(const MatrixView& w, int64_t row, int64_t span) {
  const int64_t at = row / w.format.span.n * spans(w.format, w.k) + span;
  switch (w.format.scale) {
    case Scale::kF32: {
      float f;
      std::memcpy(&f, w.scales + at * 4, 4);
      return f;
    }
    case Scale::kBf16:
    case Scale::kF16: {
      uint16_t bits;
      std::memcpy(&bits, w.scales + at * 2, 2);
      return w.format.scale == Scale::kBf16 ? to_f32(bf16{bits}) : to_f32(f16{bits});
    }
    default:
      return 1.0f;
  }
}

// Header of the record that starts at `column`: 16 of each factor side by side, zeros for padding rows.
void pack_header(const Packing& p, const MatrixView& w, int64_t first_column, int64_t block, int column,
                 std::byte* record) {
  const Layout& layout = kLayouts[p.layout];
  const Header h = header_of(layout, p.record_k / p.span);
  std::memset(record, 0, p.header_bytes);
  const int64_t rows = std::min<int64_t>(kBlockRows, p.n - block * kBlockRows);
  const int64_t all_spans = spans(w.format, w.k), all_supers = supers(w.format, w.k);
  const int source_span = w.format.span.k ? w.format.span.k : static_cast<int>(w.k);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = block * kBlockRows + r;
    if (layout.scale == Scale::kS8F16) {
      const int64_t super = row * all_supers + (first_column + column) / w.format.span.super_k;
      std::memcpy(record + h.supers + r * 2, w.supers + super * 2, 2);
      if (layout.min == Min::kS8F16) std::memcpy(record + h.super_mins + r * 2, w.super_mins + super * 2, 2);
    }
    for (int s = 0; s < p.record_k / p.span; ++s) {
      if (column + s * p.span >= p.k) break;
      const int64_t span = (first_column + column + s * p.span) / source_span;
      const int to = s * kBlockRows + static_cast<int>(r);
      const int size = scale_bytes(layout.scale);
      if (layout.scale != w.format.scale) {  // per-row scales are promoted to f32
        const float f = plain_scale(w, row, span);
        std::memcpy(record + h.scales + to * 4, &f, 4);
      } else if (size) {
        std::memcpy(record + h.scales + to * size,
                    w.scales + (row / w.format.span.n * all_spans + span) * size, size);
      }
      const int min_size = min_bytes(layout.min);
      if (min_size)
        std::memcpy(record + h.mins + to * min_size, w.mins + (row * all_spans + span) * min_size, min_size);
    }
  }
}

// pack_plane backwards: kWidth bits of every code, from bit `drop` of the code on, added to what is there.
template <typename Word, int kWidth>
void unpack_plane(const uint8_t* plane, int drop, int row_at, uint8_t* codes) {
  constexpr int kWordBytes = sizeof(Word), kSharing = 8 / kWidth, kWords = kChunk / kWordBytes / kSharing;
  constexpr Word kMask = static_cast<Word>(static_cast<Word>(~Word{0}) / 0xFF * ((1u << kWidth) - 1));
#pragma GCC unroll 8
  for (int i = 0; i < kWords; ++i) {
    Word word;
    std::memcpy(&word, plane + i * kBlockRows * kWordBytes + row_at, kWordBytes);
#pragma GCC unroll 8
    for (int j = 0; j < kSharing; ++j) {
      uint8_t* to = codes + (i * kSharing + j) * kWordBytes;
      Word step = static_cast<Word>((word >> (j * kWidth) & kMask) << drop);
      if (drop) {
        Word low;
        std::memcpy(&low, to, kWordBytes);
        step = static_cast<Word>(step | low);
      }
      std::memcpy(to, &step, kWordBytes);
    }
  }
}

// pack_row backwards.
template <typename Word>
void unpack_row(Code code, const uint8_t* chunk, int row_at, int step_stride, Word flip, uint8_t* codes) {
  constexpr int kWordBytes = sizeof(Word);
  const Planes bits = planes(code);
  if (!bits.low) {
    const int steps = kChunk * packed_code_bytes(code) / kWordBytes;
    for (int step = 0; step < steps; ++step) {
      Word word;
      std::memcpy(&word, chunk + step * step_stride + row_at, kWordBytes);
      word = static_cast<Word>(word ^ flip);
      std::memcpy(codes + step * kWordBytes, &word, kWordBytes);
    }
    return;
  }
  if (bits.low == 4) {
    unpack_plane<Word, 4>(chunk, 0, row_at, codes);
  } else {
    unpack_plane<Word, 2>(chunk, 0, row_at, codes);
  }
  const uint8_t* high = chunk + low_plane_bytes(code);
  if (bits.high == 2) {
    unpack_plane<Word, 2>(high, bits.low, row_at, codes);
  } else if (bits.high == 1) {
    unpack_plane<Word, 1>(high, bits.low, row_at, codes);
  }
}

// The 64 codes of one row of a chunk.
void unpack_chunk_row(const Packing& p, const uint8_t* chunk, int row, uint8_t* codes) {
  const Code code = p.format.code;
  const int step = step_bytes(code, p.fragment.step_bytes), stride = kBlockRows * step;
  const int row_at = row_byte(code, p.fragment.step_bytes, row);
  const uint64_t flip = adds_128(p) ? 0x8080808080808080u : 0;
  if (is_grid(code)) {
    unpack_grid_row(p, chunk, row, codes);
  } else if (in_pairs(code, p.fragment.step_bytes)) {
    for (int k = 0; k < kChunk; k += 2)
      std::memcpy(codes + k, chunk + k / 4 * 4 * kBlockRows + k / 2 % 2 * 8 + row_at, 2);
  } else if (step == 8) {
    unpack_row<uint64_t>(code, chunk, row_at, stride, flip, codes);
  } else if (step == 4) {
    unpack_row<uint32_t>(code, chunk, row_at, stride, static_cast<uint32_t>(flip), codes);
  } else if (step == 2) {
    unpack_row<uint16_t>(code, chunk, row_at, stride, 0, codes);
  } else {
    unpack_row<uint8_t>(code, chunk, row_at, stride, 0, codes);
  }
}

// A scale that packing may have widened to f32, back in its own type: exact.
void store_scale(const std::byte* from, Scale packed, Scale type, uint8_t* to) {
  if (packed == type) {
    std::memcpy(to, from, static_cast<size_t>(scale_bytes(type)));
    return;
  }
  float wide;
  std::memcpy(&wide, from, sizeof wide);
  const uint16_t bits = type == Scale::kBf16 ? to_bf16(wide).bits : to_f16(wide).bits;
  std::memcpy(to, &bits, sizeof bits);
}

// pack_header backwards.
void unpack_header(const Packing& p, const std::byte* record, int64_t rows, int64_t first_column, int column,
                   Matrix& out) {
  const Layout& layout = kLayouts[p.layout];
  const Header h = header_of(layout, p.record_k / p.span);
  const int64_t all_spans = spans(out.format, out.k), all_supers = supers(out.format, out.k);
  const int plain_span = out.format.span.k ? out.format.span.k : static_cast<int>(out.k);
  const int size = scale_bytes(layout.scale), min_size = min_bytes(layout.min);
  for (int64_t r = 0; r < rows; ++r) {
    if (layout.scale == Scale::kS8F16) {
      const int64_t super = r * all_supers + (first_column + column) / out.format.span.super_k;
      std::memcpy(out.supers.data() + super * 2, record + h.supers + r * 2, 2);
      if (layout.min == Min::kS8F16)
        std::memcpy(out.super_mins.data() + super * 2, record + h.super_mins + r * 2, 2);
    }
    for (int s = 0; s < p.record_k / p.span && column + s * p.span < p.k; ++s) {
      const int64_t at = r * all_spans + (first_column + column + s * p.span) / plain_span;
      const int from = s * kBlockRows + static_cast<int>(r);
      if (size)
        store_scale(record + h.scales + from * size, layout.scale, out.format.scale,
                    out.scales.data() + at * scale_bytes(out.format.scale));
      if (min_size)
        std::memcpy(out.mins.data() + at * min_size, record + h.mins + from * min_size,
                    static_cast<size_t>(min_size));
    }
  }
}

// The code of a row and column of a chunk.
uint32_t packed_bits(const Packing& p, const uint8_t* chunk, int row, int k) {
  const Code code = p.format.code;
  if (is_grid(code)) {
    std::array<uint8_t, kChunk> codes;
    unpack_grid_row(p, chunk, row, codes.data());
    return codes[static_cast<size_t>(k)];
  }
  const Places at = places_of(code, p.fragment.step_bytes);
  const int in_step = row_byte(code, p.fragment.step_bytes, row);
  const uint8_t* low = chunk + at.low_byte[k] + in_step;
  uint32_t bits = 0;
  if (const int low_bits = planes(code).low) {
    bits = *low >> at.low_shift[k] & ((1u << low_bits) - 1);
    if (const int high_bits = planes(code).high)
      bits |= (chunk[at.high_byte[k] + in_step] >> at.high_shift[k] & ((1u << high_bits) - 1)) << low_bits;
  } else {
    std::memcpy(&bits, low, packed_code_bytes(code));
    if (adds_128(p)) bits ^= 0x80;
  }
  return bits;
}

}  // namespace

std::string Packing::describe() const {
  return text("{} {}x{}: span {}, record {} + {} bytes, {} blocks of {} bytes", name_of(format), n, k, span,
              record_k, header_bytes, blocks, block_bytes);
}

int column_granularity(const Format& format, int64_t k) {
  if (format.span.super_k) return format.span.super_k;
  if (format.span.k == 0 || format.span.k >= k) return kChunk;
  return std::lcm(format.span.k, kChunk);
}

Packing packing_for(const Format& format, int64_t n, int64_t k, const Fragment& fragment,
                    std::string_view name) {
  check_shape(format, n, k, name);
  if (k > (1 << 24) || n > (int64_t{1} << 31)) fail("{}: {} x {} is larger than any layer", name, n, k);
  Packing p{.format = format, .fragment = fragment, .n = n, .k = k};
  p.k_pad = static_cast<int>(round_up(k, kChunk));
  if (format.min != Min::kNone && format.bias)
    fail("{}: a bias of {} besides mins or zero points", name, format.bias);
  // One f32 scale a row where a span is the whole row and there is such a layout; the format's own otherwise.
  Layout want{format.code, format.scale == Scale::kNone ? Scale::kNone : Scale::kF32, format.min,
              SpanLength::kLong};
  const bool whole_row = format.scale == Scale::kNone || format.span.k == 0 || format.span.k >= k;
  const bool promotes =
      format.min == Min::kNone && format.scale != Scale::kS8F16 && format.scale != Scale::kE8m0;
  auto found = std::find(kLayouts.begin(), kLayouts.end(), want);
  if (whole_row && promotes && found != kLayouts.end()) {
    p.span = p.k_pad;
  } else {
    const int span = format.span.k ? format.span.k : p.k_pad;
    p.span = span % kChunk == 0 ? span : span % 32 == 0 ? 32 : span % 16 == 0 ? 16 : 0;
    if (!p.span)
      fail("{}: a scale every {} columns cannot be packed (a multiple of 16 is needed)", name, span);
    want.scale = format.scale;
    want.span = p.span == 16 ? SpanLength::k16 : p.span == 32 ? SpanLength::k32 : SpanLength::kLong;
    found = std::find(kLayouts.begin(), kLayouts.end(), want);
  }
  if (is_integer(format.code) && p.span > kMaxSpan)
    fail("{}: one scale for {} columns; at most {} can be summed in 32 bits", name, k, kMaxSpan);
  if (found == kLayouts.end())
    fail_as(ErrorKind::kUnsupported, "{}: no kernel for the format {} with spans of {}", name,
            name_of(format), p.span);
  p.layout = static_cast<int>(found - kLayouts.begin());
  if (format.span.super_k) {
    p.record_k = format.span.super_k;
  } else if (p.span == p.k_pad) {
    p.record_k = p.k_pad;
  } else {
    const int span_header = kBlockRows * (scale_bytes(want.scale) + min_bytes(want.min));
    int per_record = 1;  // until header and codes both end on a cache line
    while (per_record * span_header % 64 || per_record * p.span % kChunk) ++per_record;
    p.record_k = per_record * p.span;
  }
  p.header_bytes = header_of(want, p.record_k / p.span).bytes;
  p.bias = format.bias;
  if (fragment.unsigned_bytes && (format.code == Code::kI8 || format.code == Code::kIq4)) p.bias += 128;
  p.blocks = ceil_div(n, kBlockRows);
  const int64_t records = ceil_div(p.k_pad, p.record_k);
  p.block_bytes =
      static_cast<size_t>(records * p.header_bytes + int64_t{p.k_pad} / kChunk * chunk_bytes(format.code));
  return p;
}

void pack_block(const Packing& p, const MatrixView& w, int64_t first_column, int64_t block, std::byte* out) {
  KT_CHECK(w.format == p.format && w.n == p.n && first_column + p.k <= w.k && block < p.blocks,
           "pack_block: {} x {} at column {} does not fit {}", w.n, w.k, first_column, p.describe());
  for (int column = 0; column < p.k_pad; column += kChunk) {
    if (column % p.record_k == 0) {
      if (p.header_bytes) pack_header(p, w, first_column, block, column, out);
      out += p.header_bytes;
    }
    pack_codes(p, w, first_column, block, column, out);
    out += chunk_bytes(p.format.code);
  }
}

Format unpacked_format(const Packing& packing) {
  Format format = packing.format;
  format.span.n = 1;
  return format;
}

void unpack_block(const Packing& p, const std::byte* block, int64_t rows, int64_t first_column, Matrix& out) {
  KT_CHECK(
      out.format == unpacked_format(p) && rows <= kBlockRows && rows <= out.n && first_column + p.k <= out.k,
      "unpack_block: {} x {} at column {} does not hold {}", out.n, out.k, first_column, p.describe());
  const Code code = p.format.code;
  const int size = packed_code_bytes(code);
  std::array<uint8_t, kChunk * 4> beside;
  for (int column = 0; column < p.k_pad; column += kChunk) {
    if (column % p.record_k == 0) {
      if (p.header_bytes) unpack_header(p, block, rows, first_column, column, out);
      block += p.header_bytes;
    }
    const auto* chunk = reinterpret_cast<const uint8_t*>(block);
    const auto columns = static_cast<int>(std::min<int64_t>(kChunk, p.k - column));
    for (int r = 0; r < rows; ++r) {
      uint8_t* to = out.codes.data() + (r * out.k + first_column + column) * size;
      unpack_chunk_row(p, chunk, r, columns == kChunk ? to : beside.data());
      if (columns < kChunk) std::memcpy(to, beside.data(), static_cast<size_t>(columns * size));
    }
    block += chunk_bytes(code);
  }
}

float packed_value(const Packing& p, const std::byte* blocks, int64_t row, int64_t column) {
  const Code code = p.format.code;
  const Layout& layout = kLayouts[p.layout];
  const int64_t record = column / p.record_k;
  const std::byte* header = blocks + row / kBlockRows * p.block_bytes + record * p.header_bytes +
                            record * p.record_k / kChunk * chunk_bytes(code);
  const int in_record = static_cast<int>(column % p.record_k), r = static_cast<int>(row % kBlockRows);
  const auto* chunk =
      reinterpret_cast<const uint8_t*>(header + p.header_bytes + in_record / kChunk * chunk_bytes(code));
  const uint32_t bits = packed_bits(p, chunk, r, static_cast<int>(column % kChunk));
  // One row, one span: let formats/ say what the parts mean.
  const Header h = header_of(layout, p.record_k / p.span);
  const int span = in_record / p.span * kBlockRows + r;
  auto* base = reinterpret_cast<const uint8_t*>(header);
  MatrixView one{.format = p.format, .n = 1, .k = 1, .codes = reinterpret_cast<const uint8_t*>(&bits)};
  one.format.scale = layout.scale;
  one.format.span = {.k = 1, .n = 1, .super_k = p.format.span.super_k ? 1 : 0};
  one.scales = base + h.scales + span * scale_bytes(layout.scale);
  one.mins = base + h.mins + span * min_bytes(layout.min);
  one.supers = base + h.supers + r * 2;
  one.super_mins = base + h.super_mins + r * 2;
  return value_at(one, 0, 0);
}

}  // namespace kt::inline kernels
