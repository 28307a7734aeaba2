// Packed codes (formats/layout.h) as operands of matrix instructions: a warp multiplies 16 rows of the matrix with 8
// rows of x, 16 columns at a time, from codes that it copied to its part of the block's memory.
//
// Codes become bf16 exactly, and scales, which bf16 would cut short, meet the sums of their span in f32. Which rows and
// columns stand where in an instruction is free as long as both sides agree: lane 4 i + j has rows 2 i and 2 i + 1 of a
// row block and four neighbouring columns, of which the pairs of an operand are the first and third, then the second
// and fourth (bf16: as they lie). Codes without a sign are multiplied as 128 + code, a mask and an or: sums then begin
// at -(128 + bias) times the sum of x, which a further instruction gives for all row blocks, and for mins.
#pragma once
#include "cuda/kernels/packed.h"

namespace kt::inline cuda {

// Columns that are copied at once, of the codes and of what a header has for them. A whole chunk where planes are
// separate.
template <Code kCode>
constexpr int kPieceColumns = code_bits(kCode) == 16  ? 16
                              : code_bits(kCode) == 8 ? 32
                                                      : kChunk;

// Whether the layout is read here: NVFP4 is not.
constexpr bool is_read(const Layout& layout) {
  return !(layout.code == Code::kE2m1 && layout.span == SpanLength::k16);
}
constexpr bool has_scale(Code code, Scale scale) {
  for (const Layout& layout : kLayouts)
    if (is_read(layout) && layout.code == code && layout.scale == scale) return true;
  return false;
}
constexpr bool has_min(Code code, Min min) {
  for (const Layout& layout : kLayouts)
    if (is_read(layout) && layout.code == code && layout.min == min) return true;
  return false;
}
constexpr bool has_short_spans(Code code) {
  for (const Layout& layout : kLayouts)
    if (is_read(layout) && layout.code == code && layout.span == SpanLength::k16) return true;
  return false;
}

// 16 bytes that a header has for a piece at most.
constexpr int factor_units(Code code) {
  int most = 0;
  for (const Layout& layout : kLayouts) {
    if (!is_read(layout) || layout.code != code || layout.scale == Scale::kNone) continue;
    const int columns = code_bits(code) == 8 ? 32 : kChunk;
    const int spans = layout.span == SpanLength::kLong ? 1 : columns / span_columns(layout.span);
    int units = spans * (scale_bytes(layout.scale) + min_bytes(layout.min));
    if (layout.scale == Scale::kS8F16) units += 2;
    if (layout.min == Min::kS8F16) units += 2;
    most = units > most ? units : most;
  }
  return most;
}

template <Code kCode>
struct PieceUnits {
  static constexpr int kCodes = kPieceColumns<kCode> * code_bits(kCode) * kBlockRows / 8 / 16,
                       kFactors = factor_units(kCode), kAll = kCodes + kFactors;
};

KT_GPU uint32_t lane_of() { return static_cast<uint32_t>(gpu::thread()) % gpu::kWarp; }

// What a lane copies of pieces of kBlocks row blocks, each to [blocks][codes, factors]: 16 bytes at a time. Of a header
// it takes [scales][mins][supers][super mins]; where they stand is found once.
template <Code kCode, int kBlocks>
struct PieceCopies {
  using U = PieceUnits<kCode>;
  static constexpr uint32_t kCodes = U::kCodes, kFactors = U::kFactors > 0 ? U::kFactors : 1;
  static constexpr int kTurns = (kBlocks * U::kCodes + gpu::kWarp - 1) / gpu::kWarp,
                       kFactorTurns = (kBlocks * U::kFactors + gpu::kWarp - 1) / gpu::kWarp;
  static constexpr uint32_t kSpan = has_short_spans(kCode) ? 16 : 32;  // what spans have whole numbers of
  const uint8_t* codes[kTurns];                                        // of piece 0; null: none
  const uint8_t* factors[kFactorTurns > 0 ? kFactorTurns : 1];         // of span 0; null: none
  int span_bytes[kFactorTurns > 0 ? kFactorTurns : 1];                 // from one span to the next
  int header_bytes, record_k, record_bytes;  // a row block has fewer than 2^31 bytes
  uint32_t record_divisor, span_divisor;

  // Row blocks from `first` on; those behind the last are the last once more.
  KT_GPU PieceCopies(const PackedRows& w, const uint8_t* blocks, int first)
      : header_bytes(w.header_bytes),
        record_k(w.record_k),
        record_bytes(w.header_bytes + w.record_k / kChunk * chunk_bytes(kCode)),
        record_divisor(w.record_divisor),
        span_divisor(0x80000000u / (static_cast<uint32_t>(w.span) / kSpan) + 1) {
    const int last = (w.n - 1) / kBlockRows;
    const auto block_at = [&](uint32_t b) {
      const int block = first + static_cast<int>(b);
      return blocks + (block < last ? block : last) * w.block_bytes;
    };
    for (int t = 0; t < kTurns; ++t) {
      const uint32_t unit = static_cast<uint32_t>(t * gpu::kWarp) + lane_of(), block = unit / kCodes;
      codes[t] = block < kBlocks ? block_at(block) + w.header_bytes + unit % kCodes * 16 : nullptr;
    }
    for (int t = 0; t < kFactorTurns; ++t) {
      const uint32_t unit = static_cast<uint32_t>(t * gpu::kWarp) + lane_of(), block = unit / kFactors;
      const int at = factor_at(w, static_cast<int>(unit % kFactors), span_bytes[t]);
      factors[t] = block < kBlocks && at >= 0 ? block_at(block) + at : nullptr;
    }
  }

  // Where a header has what a piece of its first columns takes as number `unit`; negative: a piece takes fewer.
  KT_GPU static int factor_at(const PackedRows& w, int unit, int& each) {
    const int spans = w.span <= 32 ? kPieceColumns<kCode> / w.span : 1;
    each = kBlockRows * scale_bytes(static_cast<Scale>(w.scale));
    if (unit * 16 < spans * each) return w.scales + unit * 16;
    unit -= spans * each / 16;
    each = kBlockRows * min_bytes(static_cast<Min>(w.min));
    if (unit * 16 < spans * each) return w.mins + unit * 16;
    unit -= spans * each / 16;
    each = 0;
    if (w.scale == static_cast<int>(Scale::kS8F16) && unit < 2) return w.supers + unit * 16;
    return w.min == static_cast<int>(Min::kS8F16) && unit < 4 ? w.super_mins + (unit - 2) * 16 : -1;
  }

  // Of a piece whose row blocks stand so many bytes further on.
  KT_GPU void copy(int piece, int64_t further, gpu::Words* to) const {
    const int column = piece * kPieceColumns<kCode>;
    const int record = divided(static_cast<int>(static_cast<uint32_t>(column) / kChunk), record_divisor);
    const int64_t at = further + (record * header_bytes + piece * (U::kCodes * 16));
    for (int t = 0; t < kTurns; ++t) {
      const uint32_t unit = static_cast<uint32_t>(t * gpu::kWarp) + lane_of();
      if ((t + 1) * gpu::kWarp <= kBlocks * U::kCodes || codes[t])
        gpu::copy16(to + unit / kCodes * U::kAll + unit % kCodes, codes[t] + at);
    }
    if constexpr (U::kFactors > 0) {
      const uint32_t in_record = static_cast<uint32_t>(column - record * record_k);
      const int span = divided(static_cast<int>(in_record / kSpan), span_divisor);
      for (int t = 0; t < kFactorTurns; ++t) {
        const uint32_t unit = static_cast<uint32_t>(t * gpu::kWarp) + lane_of();
        if (factors[t])
          gpu::copy16(to + unit / kFactors * U::kAll + U::kCodes + unit % kFactors,
                      factors[t] + further + (record * record_bytes + span * span_bytes[t]));
      }
    }
  }
};

// Whether a lane's columns of 32 are 4 j to 4 j + 3 of each 16, or 8 j to 8 j + 7: as few words as the packing allows,
// and no instruction across two spans.
template <Code kCode, int kStep>
constexpr bool kFours =
    !(kCode == Code::kU4 || kCode == Code::kU5 || kCode == Code::kIq4 || (kCode == Code::kI8 && kStep == 8));
template <Code kCode, int kStep>
constexpr int kLaneColumns = kFours<kCode, kStep> ? 4 : 8;
template <Code kCode, int kStep>
KT_GPU uint32_t first_column(int t, uint32_t j) {
  return static_cast<uint32_t>(kFours<kCode, kStep> ? t * 16 : t / 2 * 32 + t % 2 * 4) +
         j * kLaneColumns<kCode, kStep>;
}

KT_GPU uint32_t word_at(const uint8_t* from) { return *reinterpret_cast<const uint32_t*>(from); }

// Of a plane, rows 2 i and 2 i + 1, four columns from `column` on: each in the low bits of its byte, with what else is
// there.
template <int kBits, int kStep>
KT_GPU gpu::Words2 plane_bytes(const uint8_t* plane, uint32_t i, uint32_t column) {
  constexpr uint32_t kSharing = 8 / kBits;
  const uint32_t step = column / kStep, shift = step % kSharing * kBits;
  const uint8_t* const at = plane + (step / kSharing * kBlockRows + 2 * i) * kStep + column % kStep / 4 * 4;
  gpu::Words2 out;
  if constexpr (kStep == 4)
    out = gpu::load8(at);
  else
    out = {{word_at(at), word_at(at + kStep)}};
  return {{out.word[0] >> shift, out.word[1] >> shift}};
}

// Four bytes of a row as two operands: bytes 0 and 2, 1 and 3.
struct RowOperand {
  uint32_t pair[2];
};

constexpr uint32_t kOver128 = 0x43004300u;  // two bf16: 128, and below its last bit

KT_GPU RowOperand unsigned_operand(uint32_t bytes, uint32_t mask) {
  return {{(bytes & mask) | kOver128, (bytes >> 8 & mask) | kOver128}};
}
// Two's complement where `zero` is kOver128, and with 128 added where it is that and 128: 128 + the lower seven bits,
// less 128 or 256.
KT_GPU RowOperand signed_operand(uint32_t bytes, uint32_t zero) {
  constexpr uint32_t kLess = 0xBF80BF80u;
  const uint32_t other = bytes >> 8;
  return {{gpu::fma_bf16((bytes & 0x00800080u) ^ zero, kLess, (bytes & 0x007F007Fu) | kOver128),
           gpu::fma_bf16((other & 0x00800080u) ^ zero, kLess, (other & 0x007F007Fu) | kOver128)}};
}
// A bf16's bits of a float code in the high bits of each half, sign first, then `kBits` of a smaller exponent's; 2^kUp
// is what the exponents differ by.
template <int kBits, uint32_t kUp>
KT_GPU uint32_t float_operand(uint32_t halves) {
  constexpr uint32_t kRest = ((1u << kBits) - 1) * 0x00010001u;
  constexpr int kDown = kBits == 7 ? 4 : 6;  // from below the sign to where the mantissa ends
  constexpr uint32_t kMask = kRest << (15 - kBits - kDown);
  return gpu::fma_bf16((halves & 0x80008000u) | (halves >> kDown & kMask), kUp, 0x80008000u);
}
constexpr uint32_t kUp120 = 0x7B807B80u, kUp126 = 0x7E807E80u;

// What a lane gives to an instruction of 16 columns.
struct Operand {
  gpu::Words a;
  gpu::Words rest;  // of f16: what bf16 leaves
};

KT_GPU gpu::Words joined(const RowOperand& a, const RowOperand& b) {
  return {{a.pair[0], b.pair[0], a.pair[1], b.pair[1]}};
}

// Not zero in the top bit of every byte that is E4M3's NaN.
KT_GPU uint32_t e4m3_nans(uint32_t bytes) { return (bytes & 0x7F7F7F7Fu) + 0x01010101u; }

// Of one byte for each column, rows side by side: two rows of four columns.
KT_GPU void rows_of_columns(const uint8_t* at, uint32_t (&rows)[2]) {
  uint32_t two[4];
  for (int c = 0; c < 4; ++c) two[c] = half_at(at + c * kBlockRows);
  const uint32_t low = gpu::permute(two[0], two[1], 0x5140), high = gpu::permute(two[2], two[3], 0x5140);
  rows[0] = gpu::permute(low, high, 0x5410);
  rows[1] = gpu::permute(low, high, 0x7632);
}

template <Code kCode, int kStep>
KT_GPU Operand integer_operand(const uint8_t* piece, uint32_t i, uint32_t column, uint32_t zero) {
  using R = CodeReading<kCode, kStep>;
  const gpu::Words2 low = plane_bytes<R::kLowBits, kStep>(piece, i, column);
  RowOperand rows[2];
  if constexpr (kCode == Code::kI8) {
    for (int r = 0; r < 2; ++r) rows[r] = signed_operand(low.word[r], zero);
  } else if constexpr (kCode == Code::kIq4) {
    for (int r = 0; r < 2; ++r)
      rows[r] = signed_operand(iq4_entries(low.word[r] & 0x0F0F0F0Fu), kOver128 ^ 0x00800080u);
  } else if constexpr (R::kHighBits > 0) {
    constexpr uint32_t kLow = ((1u << R::kLowBits) - 1) * 0x01010101u,
                       kHigh = ((1u << R::kHighBits) - 1) * 0x01010101u;
    const gpu::Words2 high = plane_bytes<R::kHighBits, kStep>(piece + low_plane_bytes(kCode), i, column);
    for (int r = 0; r < 2; ++r)
      rows[r] = unsigned_operand((low.word[r] & kLow) | (high.word[r] & kHigh) << R::kLowBits, 0x00FF00FFu);
  } else {
    for (int r = 0; r < 2; ++r)
      rows[r] = unsigned_operand(low.word[r], ((1u << R::kLowBits) - 1) * 0x00010001u);
  }
  return {joined(rows[0], rows[1]), {}};
}

template <Code kCode, int kStep>
KT_GPU Operand float_code_operand(const uint8_t* piece, uint32_t i, uint32_t column, uint32_t (&nans)[2]) {
  if constexpr (kCode == Code::kE4m3) {
    uint32_t bytes[2];
    if constexpr (kStep == 4) {
      const uint8_t* const at = piece + (column / 4 * kBlockRows + i / 2 * 4) * 4 + i % 2 * 4;
      const uint32_t low = word_at(at), high = word_at(at + 8);
      bytes[0] = gpu::permute(low, high, 0x5410);
      bytes[1] = gpu::permute(low, high, 0x7632);
    } else {
      rows_of_columns(piece + column * kBlockRows + 2 * i, bytes);
    }
    RowOperand rows[2];
    for (int r = 0; r < 2; ++r) {
      nans[r] |= e4m3_nans(bytes[r]) & 0x80808080u;
      rows[r] = {{float_operand<7, kUp120>(bytes[r] << 8), float_operand<7, kUp120>(bytes[r])}};
    }
    return {joined(rows[0], rows[1]), {}};
  } else if constexpr (kCode == Code::kE2m1) {  // a byte is two columns of a row
    const uint8_t* const at = piece + column / 2 * kBlockRows + 2 * i;
    const uint32_t first = half_at(at), second = half_at(at + kBlockRows);
    RowOperand rows[2];
    for (uint32_t r = 0; r < 2; ++r) {
      const uint32_t halves = gpu::permute(first, second, r ? 0x5511 : 0x4400);
      rows[r] = {{float_operand<3, kUp126>(halves << 4), float_operand<3, kUp126>(halves)}};
    }
    return {joined(rows[0], rows[1]), {}};
  } else if constexpr (kCode == Code::kF16) {
    Operand out;
    for (uint32_t p = 0; p < 2; ++p) {  // columns p and p + 2
      const uint8_t* const at = piece + ((column + p) * kBlockRows + 2 * i) * 2;
      const uint32_t first = word_at(at), second = word_at(at + 2 * kBlockRows * 2);
      for (uint32_t r = 0; r < 2; ++r) {
        const float a = gpu::from_f16(static_cast<uint16_t>(first >> r * 16)),
                    b = gpu::from_f16(static_cast<uint16_t>(second >> r * 16));
        const uint32_t whole = gpu::bf16_pair(a, b);
        out.a.word[p * 2 + r] = whole;
        out.rest.word[p * 2 + r] =
            gpu::bf16_pair(a - gpu::float_of(whole << 16), b - gpu::float_of(whole & 0xFFFF0000u));
      }
    }
    return out;
  } else {  // bf16
    if constexpr (kStep == 4) {
      const uint8_t* const at = piece + (column / 2 * kBlockRows + 2 * i) * 4;
      const gpu::Words2 first = gpu::load8(at), second = gpu::load8(at + kBlockRows * 4);
      return {{{first.word[0], first.word[1], second.word[0], second.word[1]}}, {}};
    } else {
      const gpu::Words both = gpu::load16(piece + (column / 4 * kBlockRows + 2 * i) * 8);
      return {{{both.word[0], both.word[2], both.word[1], both.word[3]}}, {}};
    }
  }
}

// Four columns of x, times a number, as the other operand.
template <Code kCode>
KT_GPU gpu::Words2 input_operand(const FourNumbers& x, float times) {
  const auto pair = [&](int a, int b) { return gpu::bf16_pair(x.x[a] * times, x.x[b] * times); };
  if constexpr (kCode == Code::kBf16) return {{pair(0, 1), pair(2, 3)}};
  return {{pair(0, 2), pair(1, 3)}};
}

// Of two rows.
struct RowPair {
  float of[2];
};

// 2^23 + the lowest byte.
KT_GPU float byte_number(uint32_t byte) { return gpu::float_of(gpu::permute(byte, 0x4B000000u, 0x7440)); }
// Two bytes with a sign, times two f16.
KT_GPU RowPair super_pair(const uint8_t* bytes, const uint8_t* supers) {
  const uint32_t two = half_at(bytes) ^ 0x8080u, by = word_at(supers);
  constexpr float kZero = 0x1p23f + 128.0f;
  return {{(byte_number(two) - kZero) * gpu::from_f16(static_cast<uint16_t>(by)),
           (byte_number(two >> 8) - kZero) * gpu::from_f16(static_cast<uint16_t>(by >> 16))}};
}
KT_GPU RowPair f16_pair(const uint8_t* from) {
  const uint32_t two = word_at(from);
  return {{gpu::from_f16(static_cast<uint16_t>(two)), gpu::from_f16(static_cast<uint16_t>(two >> 16))}};
}

// What is the same for a warp's every piece.
struct OperandSpec {
  uint32_t zero;  // of signed_operand
  uint32_t less;  // -(128 + bias) as two bf16
  float over;     // 1 / (128 + bias)
  int spans;      // of a piece; 1 where they are longer
  Scale scale;
  Min min;
  int mins, supers, super_mins;  // of a piece, behind its scales

  KT_GPU OperandSpec(const PackedRows& w, int columns)
      : zero(kOver128 ^ static_cast<uint32_t>(w.flip) * 0x00010001u),
        less(gpu::bf16_pair(-128.0f - static_cast<float>(w.bias), -128.0f - static_cast<float>(w.bias))),
        over(1.0f / (128.0f + static_cast<float>(w.bias))),
        spans(w.span <= 32 ? columns / w.span : 1),
        scale(static_cast<Scale>(w.scale)),
        min(static_cast<Min>(w.min)),
        mins(spans * kBlockRows * scale_bytes(scale)),
        supers(mins + spans * kBlockRows * min_bytes(min)),
        super_mins(supers + kBlockRows * 2) {}
};

// Scales, and mins over 128 + bias, of span `span` of a piece, rows 2 i and 2 i + 1 of each row block: what kind they
// are of is asked once for all.
template <Code kCode, int kBlocks>
struct SpanFactors {
  const OperandSpec& spec;
  const uint8_t* first;  // of the first row block
  uint32_t i;

  KT_GPU const uint8_t* block(int b) const { return first + b * PieceUnits<kCode>::kAll * 16; }

  template <typename Read>
  KT_GPU static void each(RowPair (&out)[kBlocks], const Read& read) {
    for (int b = 0; b < kBlocks; ++b) out[b] = read(b);
  }

  KT_GPU void scales(int span, RowPair (&out)[kBlocks]) const {
    if constexpr (has_scale(kCode, Scale::kS8F16)) {
      if (spec.scale == Scale::kS8F16)
        return each(out, [&](int b) {
          return super_pair(block(b) + span * kBlockRows + i * 2, block(b) + spec.supers + i * 4);
        });
    }
    if constexpr (has_scale(kCode, Scale::kE8m0)) {
      if (spec.scale == Scale::kE8m0)
        return each(out, [&](int b) {
          const uint32_t two = half_at(block(b) + span * kBlockRows + i * 2);
          return RowPair{{e8m0_value(two & 0xFF), e8m0_value(two >> 8)}};
        });
    }
    if constexpr (has_scale(kCode, Scale::kBf16)) {
      if (spec.scale == Scale::kBf16)
        return each(out, [&](int b) {
          const uint32_t two = word_at(block(b) + span * kBlockRows * 2 + i * 4);
          return RowPair{{gpu::float_of(two << 16), gpu::float_of(two & 0xFFFF0000u)}};
        });
    }
    if constexpr (has_scale(kCode, Scale::kF16)) {
      if (spec.scale == Scale::kF16)
        return each(out, [&](int b) { return f16_pair(block(b) + span * kBlockRows * 2 + i * 4); });
    }
    if constexpr (has_scale(kCode, Scale::kF32))
      each(out, [&](int b) {
        const gpu::Words2 two = gpu::load8(block(b) + span * kBlockRows * 4 + i * 8);
        return RowPair{{gpu::float_of(two.word[0]), gpu::float_of(two.word[1])}};
      });
  }

  KT_GPU void mins(int span, const RowPair (&scale)[kBlocks], RowPair (&out)[kBlocks]) const {
    if (spec.min == Min::kS8F16)
      each(out, [&](int b) {
        return super_pair(block(b) + spec.mins + span * kBlockRows + i * 2,
                          block(b) + spec.super_mins + i * 4);
      });
    else if (spec.min == Min::kZero)
      each(out, [&](int b) {
        const uint32_t two = half_at(block(b) + spec.mins + span * kBlockRows + i * 2);
        return RowPair{{(byte_number(two) - 0x1p23f) * scale[b].of[0],
                        (byte_number(two >> 8) - 0x1p23f) * scale[b].of[1]}};
      });
    else
      each(out, [&](int b) { return f16_pair(block(b) + spec.mins + span * kBlockRows * 2 + i * 4); });
    for (int b = 0; b < kBlocks; ++b)
      for (int r = 0; r < 2; ++r) out[b].of[r] *= spec.over;
  }
};

template <Code kCode>
constexpr bool kHasMins =
    has_min(kCode, Min::kZero) || has_min(kCode, Min::kF16) || has_min(kCode, Min::kS8F16);

// Instructions of a span that is summed apart: of long ones 32 columns as well.
template <Code kCode>
constexpr int kSpanParts = has_short_spans(kCode) || code_bits(kCode) == 16 ? 1 : 2;

// What a lane gives to the instructions of a span, of one row block.
template <Code kCode, int kStep>
KT_GPU void span_operands(const OperandSpec& spec, const uint8_t* codes, int span, uint32_t (&nans)[2],
                          Operand (&a)[kSpanParts<kCode>]) {
  const uint32_t i = lane_of() / 4, j = lane_of() % 4;
  for (int t = 0; t < kSpanParts<kCode>; ++t) {
    const uint32_t column = first_column<kCode, kStep>(span * kSpanParts<kCode> + t, j);
    if constexpr (is_integer(kCode))
      a[t] = integer_operand<kCode, kStep>(codes, i, column, spec.zero);
    else
      a[t] = float_code_operand<kCode, kStep>(codes, i, column, nans);
  }
}

// sums[block][group] += columns [16 kSpanParts span, ...) of a piece, 16 rows of each row block by 8 of x of each
// group.
template <Code kCode, int kStep, int kBlocks, int kGroups>
KT_GPU void multiply_span(const OperandSpec& spec, const gpu::Words* piece, int span,
                          const gpu::Words2 (&x)[kGroups][kSpanParts<kCode>],
                          float (&sums)[kBlocks][kGroups][4], uint32_t (&nans)[kBlocks][2]) {
  using U = PieceUnits<kCode>;
  const auto* const codes = reinterpret_cast<const uint8_t*>(piece);
  Operand a[kSpanParts<kCode>];
  if constexpr (!CodeReading<kCode, kStep>::kScaled) {
    for (int b = 0; b < kBlocks; ++b) {
      span_operands<kCode, kStep>(spec, codes + b * U::kAll * 16, span, nans[b], a);
      for (int g = 0; g < kGroups; ++g) {
        gpu::multiply_from(sums[b][g], sums[b][g], a[0].a, x[g][0]);
        if constexpr (kCode == Code::kF16) gpu::multiply_from(sums[b][g], sums[b][g], a[0].rest, x[g][0]);
      }
    }
  } else {
    float base[kGroups][4] = {};  // -(128 + bias) times the sum of x: the same for all rows
    if constexpr (kUnsigned<kCode>)
      for (int g = 0; g < kGroups; ++g)
        for (int t = 0; t < kSpanParts<kCode>; ++t)
          gpu::multiply_from(base[g], base[g], {{spec.less, spec.less, spec.less, spec.less}}, x[g][t]);
    const SpanFactors<kCode, kBlocks> factors{spec, codes + U::kCodes * 16, lane_of() / 4};
    const int which = spec.spans > 1 ? span : 0;
    RowPair scale[kBlocks], min[kBlocks];
    factors.scales(which, scale);
    for (int b = 0; b < kBlocks; ++b) {
      span_operands<kCode, kStep>(spec, codes + b * U::kAll * 16, span, nans[b], a);
      for (int g = 0; g < kGroups; ++g) {
        float part[4];
        gpu::multiply_from(part, base[g], a[0].a, x[g][0]);
        for (int t = 1; t < kSpanParts<kCode>; ++t) gpu::multiply_from(part, part, a[t].a, x[g][t]);
        for (int s = 0; s < 4; ++s) sums[b][g][s] = gpu::fma(scale[b].of[s / 2], part[s], sums[b][g][s]);
      }
    }
    if constexpr (kHasMins<kCode>) {
      if (spec.min == Min::kNone) return;
      factors.mins(which, scale, min);
      for (int b = 0; b < kBlocks; ++b)
        for (int g = 0; g < kGroups; ++g)
          for (int s = 0; s < 4; ++s) sums[b][g][s] = gpu::fma(min[b].of[s / 2], base[g][s], sums[b][g][s]);
    }
  }
}

}  // namespace kt::inline cuda
