// How kernels read packed weights (formats/layout.h): codes of every kind, from steps of 4 and of 8 bytes, with scales and
// mins as the header of each record says. 16 neighbouring lanes are the 16 rows of a block and read neighbouring bytes.
//
// A lane takes a chunk of 64 columns at a time, and loads all of it (a half or a quarter of wide codes) before it multiplies
// the first number: no choice between kinds of scales stands between two loads.
#pragma once
#include "cuda/gpu.h"
#include "cuda/kernels/args.h"
#include "formats/layout.h"

namespace kt {

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

// How codes of a row are loaded: integers and bf16 as words of a plane, wherever steps are whole words; the others in units of
// two columns (E2M1: a byte; E4M3 in pairs: a half) or one. At most 16 registers: 64 of a lane leave room for a row of x.
template <Code kCode, int kStep>
struct CodeReading {
  static constexpr bool kWords = is_integer(kCode) || kCode == Code::kBf16;
  static constexpr int kLowBits = planes(kCode).low ? planes(kCode).low : code_bits(kCode),
                       kHighBits = planes(kCode).high;
  // Columns of a unit, and those that are loaded at once.
  static constexpr int kUnit = kCode == Code::kE2m1 || in_pairs(kCode, kStep) ? 2 : 1;
  static constexpr int kAhead = kWords && planes(kCode).low && kHighBits < 2 ? kChunk
                                : kWords || kUnit == 2                       ? 32
                                                                             : 16;
  static constexpr int kLow = kWords ? kAhead * kLowBits / 32 : kAhead / kUnit;
  static constexpr int kHigh = kWords && kHighBits ? kAhead * kHighBits / 32 : 1;
  static constexpr bool kScaled = kCode != Code::kBf16 && kCode != Code::kF16 && kCode != Code::kF32;
};

template <Code kCode, int kStep>
struct LoadedCodes {
  uint32_t low[CodeReading<kCode, kStep>::kLow], high[CodeReading<kCode, kStep>::kHigh];
};

// Word `word` of a row in a plane, both packings.
template <int kStep>
KT_GPU uint32_t word_at(const uint8_t* plane, int row, int word) {
  constexpr int kWords = kStep / 4;
  return *reinterpret_cast<const uint32_t*>(plane + (word / kWords * kBlockRows + row) * kStep +
                                            word % kWords * 4);
}

// Codes of columns [k, k + kAhead) of a chunk.
template <Code kCode, int kStep>
KT_GPU LoadedCodes<kCode, kStep> load_codes(const uint8_t* chunk, int row, int k) {
  using R = CodeReading<kCode, kStep>;
  LoadedCodes<kCode, kStep> out;
  for (int i = 0; i < R::kLow; ++i) {
    if constexpr (R::kWords) {
      out.low[i] = word_at<kStep>(chunk, row, k * R::kLowBits / 32 + i);
    } else if constexpr (kCode == Code::kE2m1) {
      out.low[i] = chunk[(k / 2 + i) * kBlockRows + row];
    } else {
      const int column = k + i * R::kUnit;
      constexpr int kColumns = step_columns(kCode, kStep), kBytes = step_bytes(kCode, kStep);
      const uint8_t* const at = chunk + column / kColumns * kBlockRows * kBytes +
                                row_byte(kCode, kStep, row) + column_byte(kCode, kStep, column % kColumns);
      if constexpr (packed_code_bytes(kCode) == 4)
        out.low[i] = *reinterpret_cast<const uint32_t*>(at);
      else if constexpr (packed_code_bytes(kCode) * R::kUnit == 2)
        out.low[i] = half_at(at);
      else
        out.low[i] = *at;
    }
  }
  if constexpr (R::kWords && R::kHighBits > 0)
    for (int i = 0; i < R::kHigh; ++i)
      out.high[i] = word_at<kStep>(chunk + low_plane_bytes(kCode), row, k * R::kHighBits / 32 + i);
  return out;
}

// Columns [k, k + 4) of a plane of at most 8 bits, k a multiple of 4: each in the low bits of its byte.
template <int kBits, int kStep>
KT_GPU uint32_t bytes_of_plane(const uint32_t* words, int k) {
  constexpr int kSharing = 8 / kBits;
  constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x01010101u;
  const int step = k / kStep, word = step / kSharing * (kStep / 4) + k % kStep / 4;
  return words[word] >> step % kSharing * kBits & kMask;
}

struct FourNumbers {
  float x[4];
};

// Codes without a sign become 1 + code / 2^bits: their bits are put below the exponent of one. Bytes with a sign, 128 added,
// become 2^23 + byte. Both exactly, and cheaper than a conversion.
template <Code kCode>
constexpr bool kUnsigned = is_integer(kCode) && kCode != Code::kI8 && kCode != Code::kIq4;

// What governs 16 columns of a row: value = number * scale + offset. Of codes without a sign, scale is the format's times
// 2^bits, and offset - ((2^bits + bias) * scale + min): exact before the min where scales have 16 bits (24 and more have room
// for 2^bits + bias), and to 2^-24 of it with scales in f32. The other numbers have no offset but a base, of all columns.
struct RowFactors {
  float scale, offset;
};

// Four codes, each in the low 4 bits of a byte, to their entries: those of the low and of the high half of the table, and a
// choice.
KT_GPU uint32_t iq4_entries(uint32_t bytes) {
  const uint32_t which = bytes & 0x07070707u, selector = (which | which >> 4) & 0x00FF00FFu,
                 four = (selector | selector >> 8) & 0xFFFFu;
  const uint32_t low = gpu::permute(iq4_word(0), iq4_word(4), four),
                 high = gpu::permute(iq4_word(8), iq4_word(12), four);
  const uint32_t mask = (bytes >> 3 & 0x01010101u) * 0xFFu;
  return (low & ~mask) | (high & mask);
}

// Columns [k, k + 4) of what was loaded, k a multiple of 4.
template <Code kCode, int kStep>
KT_GPU FourNumbers four_numbers(const LoadedCodes<kCode, kStep>& codes, int k, uint32_t flip) {
  using R = CodeReading<kCode, kStep>;
  FourNumbers out;
  if constexpr (is_integer(kCode)) {
    uint32_t bytes = bytes_of_plane<R::kLowBits, kStep>(codes.low, k);
    if constexpr (R::kHighBits > 0)
      bytes |= bytes_of_plane<R::kHighBits, kStep>(codes.high, k) << R::kLowBits;
    if constexpr (kCode == Code::kI8) bytes ^= flip;
    if constexpr (kCode == Code::kIq4) bytes = iq4_entries(bytes);
    if constexpr (kUnsigned<kCode>) bytes = bytes << (7 - code_bits(kCode)) | 0x80808080u;
    constexpr uint32_t kHigh = kUnsigned<kCode> ? 0x3F000000u : 0x4B000000u;
    for (uint32_t i = 0; i < 4; ++i)
      out.x[i] = gpu::float_of(gpu::permute(bytes, kHigh, kUnsigned<kCode> ? 0x7044u | i << 8 : 0x7440u | i));
  } else if constexpr (kCode == Code::kBf16) {
    for (int i = 0; i < 4; i += 2) {
      const uint32_t pair = codes.low[(k + i) / 2];
      out.x[i] = gpu::float_of(pair << 16);
      out.x[i + 1] = gpu::float_of(pair & 0xFFFF0000u);
    }
  } else {
    for (int i = 0; i < 4; ++i) {
      const uint32_t unit = codes.low[(k + i) / R::kUnit];
      if constexpr (kCode == Code::kE2m1)
        out.x[i] = e2m1_value(unit >> (k + i) % 2 * 4 & 15);
      else if constexpr (kCode == Code::kE4m3)
        out.x[i] = e4m3_value(R::kUnit == 2 ? unit >> (k + i) % 2 * 8 & 0xFF : unit);
      else if constexpr (kCode == Code::kF16)
        out.x[i] = gpu::from_f16(static_cast<uint16_t>(unit));
      else
        out.x[i] = gpu::float_of(unit);
    }
  }
  return out;
}

// Scales, mins and zero points of `kParts` times 16 columns, as they stand in the header of a record.
template <int kParts>
struct StoredFactors {
  float scale[kParts], min[kParts], zero[kParts];
};

// What `read` gives for each place; once for two that are the same.
template <int kParts, typename Read>
KT_GPU void read_places(const int* at, float* out, const Read& read) {
  for (int p = 0; p < kParts; ++p) out[p] = p % 2 == 1 && at[p] == at[p - 1] ? out[p - 1] : read(at[p]);
}

// From column `column` of the record on, which is a multiple of as many.
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
  for (int p = 0; p < kParts; ++p) out.scale[p] = 1, out.min[p] = out.zero[p] = 0;
  const uint8_t *const scales = header + w.scales, *const mins = header + w.mins;
  switch (static_cast<Scale>(w.scale)) {
    case Scale::kNone:
      break;
    case Scale::kF32:
      read_places<kParts>(at, out.scale, [&](int i) { return reinterpret_cast<const float*>(scales)[i]; });
      break;
    case Scale::kBf16:
      read_places<kParts>(at, out.scale, [&](int i) { return gpu::from_bf16(half_at(scales + i * 2)); });
      break;
    case Scale::kF16:
      read_places<kParts>(at, out.scale, [&](int i) { return gpu::from_f16(half_at(scales + i * 2)); });
      break;
    case Scale::kE8m0:
      read_places<kParts>(at, out.scale, [&](int i) { return e8m0_value(scales[i]); });
      break;
    case Scale::kS8F16: {
      const float super = gpu::from_f16(half_at(header + w.supers + row * 2));
      read_places<kParts>(at, out.scale,
                          [&](int i) { return static_cast<float>(static_cast<int8_t>(scales[i])) * super; });
      break;
    }
  }
  switch (static_cast<Min>(w.min)) {
    case Min::kNone:
      break;
    case Min::kZero:
      read_places<kParts>(at, out.zero, [&](int i) { return static_cast<float>(mins[i]); });
      break;
    case Min::kF16:
      read_places<kParts>(at, out.min, [&](int i) { return gpu::from_f16(half_at(mins + i * 2)); });
      break;
    case Min::kS8F16: {
      const float super = gpu::from_f16(half_at(header + w.super_mins + row * 2));
      read_places<kParts>(at, out.min,
                          [&](int i) { return static_cast<float>(static_cast<int8_t>(mins[i])) * super; });
      break;
    }
  }
  return out;
}

template <Code kCode, int kParts>
KT_GPU void load_factors(const PackedRows& w, const uint8_t* header, int column, int row, RowFactors* out) {
  const StoredFactors<kParts> stored = stored_factors<kParts>(w, header, column, row);
  for (int p = 0; p < kParts; ++p) {
    if constexpr (kUnsigned<kCode>) {
      constexpr float kWhole = static_cast<float>(1 << code_bits(kCode));
      out[p].scale = stored.scale[p] * kWhole;
      out[p].offset =
          -gpu::fma(kWhole + static_cast<float>(w.bias) + stored.zero[p], stored.scale[p], stored.min[p]);
    } else {
      out[p] = {stored.scale[p], 0.0f};
    }
  }
}

// A number of integer or scaled codes with its factors.
template <Code kCode>
KT_GPU float scaled(float number, const RowFactors& f, float base) {
  if constexpr (kUnsigned<kCode>) return gpu::fma(number, f.scale, f.offset);
  return (is_integer(kCode) ? number - base : number) * f.scale;
}

// Rows of x, from the chunk's first column on.
struct InputRows {
  const float* x;
  int64_t stride;
  int rows;
};

// Four columns of x from k on; of a chunk that is not whole, or stands at no multiple of 16 bytes, one by one, and zeros
// behind the last.
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

// sums[r] += a chunk of one row of the matrix times row r of x. `column` is the chunk's first in its record, and `left` how
// many columns the matrix has from there on.
template <Code kCode, int kStep, int kRows>
KT_GPU void add_chunk(const PackedRows& w, const uint8_t* header, int column, int row, const InputRows& in,
                      int left, bool whole, float* sums) {
  using R = CodeReading<kCode, kStep>;
  const uint8_t* const chunk = header + w.header_bytes + column / kChunk * chunk_bytes(kCode);
  const uint32_t flip = (static_cast<uint32_t>(w.flip) ^ 0x80u) * 0x01010101u;
  const float base = 0x1p23f + 128.0f + static_cast<float>(w.bias);
  KT_UNROLL(1)
  for (int k0 = 0; k0 < kChunk; k0 += R::kAhead) {
    const LoadedCodes<kCode, kStep> codes = load_codes<kCode, kStep>(chunk, row, k0);
    RowFactors factors[R::kAhead / 16];
    if constexpr (R::kScaled) load_factors<kCode, R::kAhead / 16>(w, header, column + k0, row, factors);
    KT_UNROLL(16)
    for (int k = 0; k < R::kAhead; k += 4) {
      FourNumbers value = four_numbers<kCode, kStep>(codes, k, flip);
      if constexpr (R::kScaled)
        for (float& x : value.x) x = scaled<kCode>(x, factors[k / 16], base);
      for (int r = 0; r < kRows; ++r) {
        if (kRows > 1 && r >= in.rows) break;
        const FourNumbers x = numbers_at(in.x + r * in.stride, k0 + k, left, whole);
        for (int c = 0; c < 4; ++c) sums[r] = gpu::fma(x.x[c], value.x[c], sums[r]);
      }
    }
  }
}

// sums[r] += chunk `chunk` of row `row` of a row block times row r of x [rows, k].
template <Code kCode, int kStep, int kRows>
KT_GPU void add_chunk_of_rows(const PackedRows& w, const uint8_t* block, int chunk, int row,
                              const InputRows& x, float* sums) {
  const int first = chunk * kChunk, record = divided(chunk, w.record_divisor),
            column = first - record * w.record_k;
  const uint8_t* const header =
      block + record * (int64_t{w.header_bytes} + w.record_k / kChunk * chunk_bytes(kCode));
  const InputRows in{x.x + first, x.stride, x.rows};
  const int left = w.k - first;
  const bool whole =
      left >= kChunk && (reinterpret_cast<uintptr_t>(x.x) | static_cast<uintptr_t>(x.stride * 4)) % 16 == 0;
  if (kRows > 1)
    add_chunk<kCode, kStep, kRows>(w, header, column, row, in, left, whole, sums);
  else if (whole)  // one choice for all loads
    add_chunk<kCode, kStep, kRows>(w, header, column, row, in, left, true, sums);
  else
    add_chunk<kCode, kStep, kRows>(w, header, column, row, in, left, false, sums);
}

}  // namespace kt
