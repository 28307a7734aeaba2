// How kernels read packed weights (formats/layout.h): codes of every kind, from steps of 4 and of 8 bytes, with scales
// and mins as the header of each record says.
//
// A lane takes 4 rows of a row block and a piece of 16 or 32 columns, which it loads before it multiplies the first
// number: rows of a block are neighbours in memory, so loads are of 16 bytes, four lanes' are 64 bytes and a number of
// x serves four rows; and no choice between kinds of scales stands between two loads.
#pragma once
#include "cuda/gpu.h"
#include "cuda/kernels/args.h"
#include "formats/layout.h"

namespace kt::inline cuda {

KT_GPU float e4m3_value(uint32_t code) {
  const uint32_t sign = (code & 0x80) << 24, rest = code & 0x7F;
  if (rest == 0x7F) return gpu::float_of(0x7FC00000u);
  return gpu::float_of(sign | gpu::bits_of(gpu::float_of(rest << 20) * 0x1p120f));
}
KT_GPU float e2m1_value(uint32_t code) {
  return gpu::float_of((code & 8) << 28 | gpu::bits_of(gpu::float_of((code & 7) << 22) * 0x1p126f));
}
KT_GPU float e8m0_value(uint32_t code) {
  if (code == 255) return gpu::float_of(0x7FC00000u);
  return code == 0 ? 0x1p-127f : gpu::float_of(code << 23);
}

// 4 entries of the table of kIq4 codes in a word, with 128 added.
constexpr uint32_t iq4_word(int first) {
  uint32_t word = 0;
  for (int i = 3; i >= 0; --i)
    word = word << 8 | static_cast<uint8_t>(kIq4Values[static_cast<size_t>(first + i)] + 128);
  return word;
}

KT_GPU int divided(int chunks, uint32_t divisor) {
  return static_cast<int>(uint64_t{static_cast<uint32_t>(chunks)} * divisor >> 31);
}

KT_GPU uint16_t half_at(const uint8_t* from) { return *reinterpret_cast<const uint16_t*>(from); }

inline constexpr int kLaneRows = 4, kRowLanes = kBlockRows / kLaneRows;

// How many columns a lane loads at once, kMost or fewer, and words of a row for them: integers and bf16 in planes, of
// which the higher has at least a step's words; the others by columns.
template <Code kCode, int kStep, int kMost = 32>
struct CodeReading {
  static constexpr bool kPlanes = is_integer(kCode) || kCode == Code::kBf16;
  static constexpr int kLowBits = planes(kCode).low ? planes(kCode).low : code_bits(kCode),
                       kHighBits = planes(kCode).high;
  static constexpr bool kNarrow = code_bits(kCode) <= 4 && kHighBits == 0;
  static constexpr int kColumns = kCode == Code::kF32      ? 8
                                  : kNarrow && kMost >= 32 ? 32
                                                           : 16;  // as registers allow
  static constexpr int words(int bits) {
    return kColumns * bits / 32 > kStep / 4 ? kColumns * bits / 32 : kStep / 4;
  }
  static constexpr int kLow = kPlanes ? words(kLowBits) : kColumns * code_bits(kCode) / 32;
  static constexpr int kHigh = kPlanes && kHighBits ? words(kHighBits) : 1;
  static constexpr bool kScaled = kCode != Code::kBf16 && kCode != Code::kF16 && kCode != Code::kF32;
  static constexpr int kParts = kColumns < 16 ? 1 : kColumns / 16;  // that have their own scales
};

// Words of planes: [row][word]. Of codes by columns: words as they lie, four rows after four.
template <Code kCode, int kStep, int kMost = 32>
struct LoadedCodes {
  uint32_t low[kLaneRows * CodeReading<kCode, kStep, kMost>::kLow],
      high[kLaneRows * CodeReading<kCode, kStep, kMost>::kHigh];
};

// The first word of a row in a plane that has columns from k on.
template <int kBits, int kStep>
KT_GPU int first_word(int k) {
  constexpr int kShared = kBits < 8 ? 8 / kBits * kStep : kStep * 8 / kBits;  // columns of a step's words
  return k / kShared * (kStep / 4);
}

// `kWords` words of each of the lane's rows, from word `first` of a plane on.
template <int kStep, int kWords>
KT_GPU void load_plane(const uint8_t* plane, int row, int first, uint32_t* out) {
  constexpr int kOfStep = kStep / 4;
  for (int i = 0; i < kWords; i += kOfStep) {
    const uint8_t* const at = plane + ((first + i) / kOfStep * kBlockRows + row) * kStep;
    for (int part = 0; part < kOfStep; ++part) {
      const gpu::Words words = gpu::load16(at + part * 16);
      for (int w = 0; w < 4; ++w) {
        const int which = part * 4 + w;  // word of the step, row after row
        out[which / kOfStep * kWords + i + which % kOfStep] = words.word[w];
      }
    }
  }
}

// Codes of columns [k, k + kColumns) of a chunk, rows [row, row + 4).
template <Code kCode, int kStep, int kMost = 32>
KT_GPU LoadedCodes<kCode, kStep, kMost> load_codes(const uint8_t* chunk, int row, int k) {
  using R = CodeReading<kCode, kStep, kMost>;
  LoadedCodes<kCode, kStep, kMost> out;
  if constexpr (R::kPlanes) {
    load_plane<kStep, R::kLow>(chunk, row, first_word<R::kLowBits, kStep>(k), out.low);
    if constexpr (R::kHighBits > 0)
      load_plane<kStep, R::kHigh>(chunk + low_plane_bytes(kCode), row, first_word<R::kHighBits, kStep>(k),
                                  out.high);
  } else if constexpr (kCode == Code::kF32 || in_pairs(kCode, kStep)) {  // 16 bytes: a column, or four
    constexpr int kOnce = kCode == Code::kF32 ? 1 : 4;
    for (int i = 0; i < R::kColumns / kOnce; ++i) {
      const gpu::Words words = gpu::load16(chunk + ((k / kOnce + i) * kBlockRows + row) * 4);
      for (int w = 0; w < 4; ++w) out.low[i * 4 + w] = words.word[w];
    }
  } else {  // 4 or 8 bytes: a column, or two of E2M1
    constexpr int kOnce = kCode == Code::kE2m1 ? 2 : 1, kBytes = packed_code_bytes(kCode);
    for (int i = 0; i < R::kColumns / kOnce; ++i)
      for (int w = 0; w < kBytes; ++w)
        out.low[i * kBytes + w] =
            reinterpret_cast<const uint32_t*>(chunk + ((k / kOnce + i) * kBlockRows + row) * kBytes)[w];
  }
  return out;
}

// Columns [k0 + k, k0 + k + 4) of a row in a plane of at most 8 bits, k a multiple of 4 and k0 the first that was
// loaded: each in the low bits of its byte.
template <int kBits, int kStep, int kColumns>
KT_GPU uint32_t bytes_of_plane(const uint32_t* words, int k0, int k) {
  constexpr int kSharing = 8 / kBits;
  constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x01010101u;
  const int step = kSharing * kStep > kColumns
                       ? (k0 + k) / kStep
                       : k / kStep;  // where fewer columns than share words are loaded
  const int word =
      kSharing * kStep > kColumns ? k % kStep / 4 : step / kSharing * (kStep / 4) + k % kStep / 4;
  return words[word] >> step % kSharing * kBits & kMask;
}

struct FourNumbers {
  float x[4];
};

// Codes without a sign become 1 + code / 2^bits: their bits are put below the exponent of one. Bytes with a sign, 128
// added, become 2^23 + byte. Both exactly, and cheaper than a conversion.
template <Code kCode>
constexpr bool kUnsigned = is_integer(kCode) && kCode != Code::kI8 && kCode != Code::kIq4;

// What governs 16 columns of a row: value = number * scale + offset. Of codes without a sign, scale is the format's
// times 2^bits, and offset - ((2^bits + bias) * scale + min): exact before the min where scales have 16 bits (24 and
// more have room for 2^bits + bias), and to 2^-24 of it with scales in f32. The other numbers have no offset but a
// base, of all columns.
struct RowFactors {
  float scale, offset;
};

// Four codes, each in the low 4 bits of a byte, to their entries: those of the low and of the high half of the table,
// and a choice.
KT_GPU uint32_t iq4_entries(uint32_t bytes) {
  const uint32_t which = bytes & 0x07070707u, selector = (which | which >> 4) & 0x00FF00FFu,
                 four = (selector | selector >> 8) & 0xFFFFu;
  const uint32_t low = gpu::permute(iq4_word(0), iq4_word(4), four),
                 high = gpu::permute(iq4_word(8), iq4_word(12), four);
  const uint32_t mask = (bytes >> 3 & 0x01010101u) * 0xFFu;
  return (low & ~mask) | (high & mask);
}

// Columns [k, k + 4) of what was loaded from k0 on, of the lane's row r; k is a multiple of 4.
template <Code kCode, int kStep, int kMost>
KT_GPU FourNumbers four_numbers(const LoadedCodes<kCode, kStep, kMost>& codes, int r, int k0, int k,
                                uint32_t flip) {
  using R = CodeReading<kCode, kStep, kMost>;
  FourNumbers out;
  if constexpr (is_integer(kCode)) {
    uint32_t bytes = bytes_of_plane<R::kLowBits, kStep, R::kColumns>(codes.low + r * R::kLow, k0, k);
    if constexpr (R::kHighBits > 0)
      bytes |= bytes_of_plane<R::kHighBits, kStep, R::kColumns>(codes.high + r * R::kHigh, k0, k)
               << R::kLowBits;
    if constexpr (kCode == Code::kI8) bytes ^= flip;
    if constexpr (kCode == Code::kIq4) bytes = iq4_entries(bytes);
    if constexpr (kUnsigned<kCode>) bytes = bytes << (7 - code_bits(kCode)) | 0x80808080u;
    constexpr uint32_t kHigh = kUnsigned<kCode> ? 0x3F000000u : 0x4B000000u;
    for (uint32_t i = 0; i < 4; ++i)
      out.x[i] = gpu::float_of(gpu::permute(bytes, kHigh, kUnsigned<kCode> ? 0x7044u | i << 8 : 0x7440u | i));
  } else if constexpr (kCode == Code::kBf16) {
    for (int i = 0; i < 4; i += 2) {
      const uint32_t pair = codes.low[r * R::kLow + (k + i) / 2];
      out.x[i] = gpu::float_of(pair << 16);
      out.x[i + 1] = gpu::float_of(pair & 0xFFFF0000u);
    }
  } else {
    for (int i = 0; i < 4; ++i) {
      const int column = k + i;
      if constexpr (kCode == Code::kE2m1)
        out.x[i] = e2m1_value(codes.low[column / 2] >> (r * 8 + column % 2 * 4) & 15);
      else if constexpr (in_pairs(kCode, kStep))
        out.x[i] = e4m3_value(
            codes.low[column / 4 * 4 + column % 4 / 2 * 2 + r / 2] >> (r % 2 * 16 + column % 2 * 8) & 0xFF);
      else if constexpr (kCode == Code::kE4m3)
        out.x[i] = e4m3_value(codes.low[column] >> r * 8 & 0xFF);
      else if constexpr (kCode == Code::kF16)
        out.x[i] = gpu::from_f16(static_cast<uint16_t>(codes.low[column * 2 + r / 2] >> r % 2 * 16));
      else
        out.x[i] = gpu::float_of(codes.low[column * 4 + r]);
    }
  }
  return out;
}

// Of the lane's rows, `kParts` times 16 columns each: what a header has for them.
template <int kParts>
struct StoredFactors {
  float scale[kParts][kLaneRows], min[kParts][kLaneRows], zero[kParts][kLaneRows];
};

// What `read` gives for the lane's rows at each place; once for two places that are the same.
template <int kParts, typename Read>
KT_GPU void read_places(const int* at, float (*out)[kLaneRows], const Read& read) {
  for (int p = 0; p < kParts; ++p)
    for (int i = 0; i < kLaneRows; ++i)
      out[p][i] = p % 2 == 1 && at[p] == at[p - 1] ? out[p - 1][i] : read(at[p] + i, i);
}

// From column `column` of the record on, which is a multiple of as many, rows from `row` on.
template <int kParts>
KT_GPU StoredFactors<kParts> stored_factors(const PackedRows& w, const uint8_t* header, int column, int row) {
  // A long span begins with a chunk.
  const int span = w.span == 32   ? column / 32
                   : w.span == 16 ? column / 16
                                  : divided(column / kChunk, w.span_divisor);
  int at[kParts];
  for (int p = 0; p < kParts; ++p)
    at[p] = (span + (w.span == 16 ? p : w.span == 32 ? p / 2 : 0)) * kBlockRows + row;
  StoredFactors<kParts> out;
  for (int p = 0; p < kParts; ++p)
    for (int i = 0; i < kLaneRows; ++i) out.scale[p][i] = 1, out.min[p][i] = out.zero[p][i] = 0;
  const uint8_t *const scales = header + w.scales, *const mins = header + w.mins;
  switch (static_cast<Scale>(w.scale)) {
    case Scale::kNone:
    case Scale::kE4m3:  // refused (nn/gpu_weights.h)
      break;
    case Scale::kF32:
      read_places<kParts>(at, out.scale,
                          [&](int n, int) { return reinterpret_cast<const float*>(scales)[n]; });
      break;
    case Scale::kBf16:
      read_places<kParts>(at, out.scale, [&](int n, int) { return gpu::from_bf16(half_at(scales + n * 2)); });
      break;
    case Scale::kF16:
      read_places<kParts>(at, out.scale, [&](int n, int) { return gpu::from_f16(half_at(scales + n * 2)); });
      break;
    case Scale::kE8m0:
      read_places<kParts>(at, out.scale, [&](int n, int) { return e8m0_value(scales[n]); });
      break;
    case Scale::kS8F16:
      read_places<kParts>(at, out.scale, [&](int n, int i) {
        return static_cast<float>(static_cast<int8_t>(scales[n])) *
               gpu::from_f16(half_at(header + w.supers + (row + i) * 2));
      });
      break;
  }
  switch (static_cast<Min>(w.min)) {
    case Min::kNone:
      break;
    case Min::kZero:
      read_places<kParts>(at, out.zero, [&](int n, int) { return static_cast<float>(mins[n]); });
      break;
    case Min::kF16:
      read_places<kParts>(at, out.min, [&](int n, int) { return gpu::from_f16(half_at(mins + n * 2)); });
      break;
    case Min::kS8F16:
      read_places<kParts>(at, out.min, [&](int n, int i) {
        return static_cast<float>(static_cast<int8_t>(mins[n])) *
               gpu::from_f16(half_at(header + w.super_mins + (row + i) * 2));
      });
      break;
  }
  return out;
}

template <Code kCode, int kParts>
KT_GPU void load_factors(const PackedRows& w, const uint8_t* header, int column, int row,
                         RowFactors (*out)[kLaneRows]) {
  const StoredFactors<kParts> stored = stored_factors<kParts>(w, header, column, row);
  for (int p = 0; p < kParts; ++p) {
    for (int i = 0; i < kLaneRows; ++i) {
      const float scale = stored.scale[p][i];
      if constexpr (kUnsigned<kCode>) {
        constexpr float kWhole = static_cast<float>(1 << code_bits(kCode));
        out[p][i] = {scale * kWhole, -gpu::fma(kWhole + static_cast<float>(w.bias) + stored.zero[p][i], scale,
                                               stored.min[p][i])};
      } else {
        out[p][i] = {scale, 0.0f};
      }
    }
  }
}

// What stored bytes are turned around with before 128 is added, and what those numbers then have too much.
KT_GPU uint32_t flip_of(const PackedRows& w) { return (static_cast<uint32_t>(w.flip) ^ 0x80u) * 0x01010101u; }
KT_GPU float base_of(const PackedRows& w) { return 0x1p23f + 128.0f + static_cast<float>(w.bias); }

// A number of integer or scaled codes with its factors.
template <Code kCode>
KT_GPU float scaled(float number, const RowFactors& f, float base) {
  if constexpr (kUnsigned<kCode>) return gpu::fma(number, f.scale, f.offset);
  return (is_integer(kCode) ? number - base : number) * f.scale;
}

// Rows of x, from the piece's first column on.
struct InputRows {
  const float* x;
  int64_t stride;
  int rows;
};

// Four columns of x from k on; of a piece that is not whole, or stands at no multiple of 16 bytes, one by one, and
// zeros behind the last.
KT_GPU FourNumbers numbers_at(const float* x, int k, int left, bool whole) {
  FourNumbers out;
  if (whole) {
    const gpu::Words words = gpu::load16(x + k);
    for (int i = 0; i < 4; ++i) out.x[i] = gpu::float_of(words.word[i]);
  } else {
    for (int i = 0; i < 4; ++i) out.x[i] = k + i < left ? x[k + i] : 0.0f;
  }
  return out;
}

// Where a piece lies: its record, the chunk's first column there, the piece's in the chunk, and how many columns the
// matrix has from there on.
struct PieceAt {
  const uint8_t* header;
  int column, k0, left;
};
template <Code kCode>
KT_GPU PieceAt piece_from(const PackedRows& w, const uint8_t* block, int first) {
  const int chunk = first / kChunk, record = divided(chunk, w.record_divisor);
  return {block + record * (int64_t{w.header_bytes} + w.record_k / kChunk * chunk_bytes(kCode)),
          chunk * kChunk - record * w.record_k, first % kChunk, w.k - first};
}
template <Code kCode>
KT_GPU const uint8_t* chunk_of(const PackedRows& w, const PieceAt& at) {
  return at.header + w.header_bytes + at.column / kChunk * chunk_bytes(kCode);
}

// sums[x row][row] += a piece of the lane's rows of the matrix times rows of x.
template <Code kCode, int kStep, int kRows>
KT_GPU void add_piece(const PackedRows& w, const PieceAt& at, int row, const InputRows& in, bool whole,
                      float (*sums)[kLaneRows]) {
  using R = CodeReading<kCode, kStep>;
  const uint8_t* const chunk = chunk_of<kCode>(w, at);
  const uint32_t flip = flip_of(w);
  const float base = base_of(w);
  const LoadedCodes<kCode, kStep> codes = load_codes<kCode, kStep>(chunk, row, at.k0);
  RowFactors factors[R::kParts][kLaneRows];
  if constexpr (R::kScaled) load_factors<kCode, R::kParts>(w, at.header, at.column + at.k0, row, factors);
  KT_UNROLL(8)
  for (int k = 0; k < R::kColumns; k += 4) {
    FourNumbers value[kLaneRows];
    for (int i = 0; i < kLaneRows; ++i) {
      value[i] = four_numbers<kCode, kStep>(codes, i, at.k0, k, flip);
      if constexpr (R::kScaled)
        for (float& x : value[i].x) x = scaled<kCode>(x, factors[k / 16][i], base);
    }
    for (int r = 0; r < kRows; ++r) {
      if (kRows > 1 && r >= in.rows) break;
      const FourNumbers x = numbers_at(in.x + r * in.stride, k, at.left, whole);
      for (int c = 0; c < 4; ++c)
        for (int i = 0; i < kLaneRows; ++i) sums[r][i] = gpu::fma(x.x[c], value[i].x[c], sums[r][i]);
    }
  }
}

template <Code kCode, int kStep>
KT_GPU int pieces_of(int k) {
  constexpr int kColumns = CodeReading<kCode, kStep>::kColumns;
  return (k + kColumns - 1) / kColumns;
}

// The same of piece `piece` of a row block, rows from `row` on, and x [rows, k].
template <Code kCode, int kStep, int kRows>
KT_GPU void add_piece_of_rows(const PackedRows& w, const uint8_t* block, int piece, int row,
                              const InputRows& x, float (*sums)[kLaneRows]) {
  constexpr int kColumns = CodeReading<kCode, kStep>::kColumns;
  const int first = piece * kColumns;
  const PieceAt at = piece_from<kCode>(w, block, first);
  const InputRows in{x.x + first, x.stride, x.rows};
  const bool whole = at.left >= kColumns &&
                     (reinterpret_cast<uintptr_t>(x.x) | static_cast<uintptr_t>(x.stride * 4)) % 16 == 0;
  add_piece<kCode, kStep, kRows>(w, at, row, in, whole, sums);
}

// Sums of the lanes of a warp that have the same rows, the same on all of them.
KT_GPU void add_lanes(float* sums) {
  for (int mask = kRowLanes; mask < gpu::kWarp; mask *= 2)
    for (int i = 0; i < kLaneRows; ++i) sums[i] += gpu::shuffle_xor(sums[i], mask);
}

// Which product a block is of.
KT_GPU int matrix_of_block(const ProductsArgs& args) {
  int which = 0;
  while (which + 1 < args.count && gpu::block() >= args.first[which + 1]) ++which;
  return which;
}

}  // namespace kt::inline cuda
