// Widening: a block of any format becomes a plain panel that one multiply loop per product can take.
//
// s8 panels have the packed order of 8-bit codes (layout.h). A whole-row integer format widens exactly. The
// others are rounded again, to one scale D per row and panel:
//   D = max over spans of the largest |value| the span can hold / 127      (from scales and mins alone)
//   byte = floor((code * S + C) / 256)  with  S = rne(256 * scale / D),
//                                             C = 128 - bias * S - rne(256 * min / D)  (+ 128 * 256 if unsigned)
// all modulo 2^16. Error of one weight: 1/2 from the rounding, |code - bias| / 512 <= 1/4 from S, 1/512 from
// C, so under 0.76 D. Overflow: |value| <= 127 D, and 127.76 < 128. Half a D is little for one weight, and much where
// it meets an outlier a hundred times as large as its neighbours. So what stands below the byte is kept beside it where
// codes are huge (table.h): a fraction f, byte + (f - 128) / 256 being the weight within |code - bias| / 512 + 1/512,
// which codes of 6 bits and fewer keep under 0.07.
//
// bf16 and f32 panels hold (code - bias) * scale - min, rounded to f32, then to bf16.
#pragma once
#include "kernels/few.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

// The chunks of columns [k0, k1) of one row block, with the header that governs each.
template <Layout kL, class F>
KT_INLINE void for_chunks(const Packing& p, const uint8_t* block, int k0, int k1, F&& f) {
  const int record = k0 / p.record_k;
  const uint8_t* header =
      block + record * (static_cast<int64_t>(p.header_bytes) + p.record_k / kChunk * chunk_bytes(kL.code));
  const uint8_t* codes = header + p.header_bytes + (k0 - record * p.record_k) / kChunk * chunk_bytes(kL.code);
  const int spans_per_record = p.record_k / p.span;
  for (int k = k0; k < k1; k += kChunk) {
    if (k != k0 && k % p.record_k == 0) {
      header = codes;
      codes += p.header_bytes;
    }
    f(SpanFactors<kL>(header, spans_per_record), codes, k, k % p.record_k);
    codes += chunk_bytes(kL.code);
  }
}

constexpr int code_span(const Layout& layout) {
  return layout.span == SpanLength::kLong ? kChunk : span_columns(layout.span);
}

// The largest |value| a span with this scale and min can hold.
template <Layout kL>
KT_INLINE typename Isa::F32 span_reach(const SpanFactors<kL>& f, int span, int row, int bias) {
  const auto scale = f.scale(span, row);
  int lowest = 0, highest = (1 << code_bits(kL.code)) - 1;
  if constexpr (kL.code == Code::kI8) lowest = -128, highest = 127, bias = 0;
  if constexpr (kL.code == Code::kIq4) lowest = -127, highest = 113, bias = 0;
  if constexpr (is_grid(kL.code)) highest = grid_of(kL.code).largest, lowest = -highest, bias = 0;
  const auto from = Isa::set1(static_cast<float>(lowest - bias)),
             to = Isa::set1(static_cast<float>(highest - bias));
  if constexpr (kL.min == Min::kNone)
    return Isa::mul(Isa::max(Isa::abs(from), Isa::abs(to)), Isa::abs(scale));
  auto min = f.min(span, row);
  if constexpr (kL.min == Min::kZero) min = Isa::mul(Isa::to_f32(f.zero(span, row)), scale);
  const auto a = Isa::abs(Isa::sub(Isa::mul(from, scale), min)),
             b = Isa::abs(Isa::sub(Isa::mul(to, scale), min));
  return Isa::max(a, b);
}

// 64 columns of a whole-row integer format, exactly
template <Layout kL>
KT_INLINE void widen_chunk(const uint8_t* codes, uint8_t* to, const typename Isa::Table& table) {
  if constexpr (is_grid(kL.code)) {
    look_up_chunk<kL.code>(codes, to);
    return;
  }
  for (int u = 0; u < kChunk / Isa::kStep; u += unit_steps(kL)) {
    const CodesAt at = unit_at<kL>(codes, u / unit_steps(kL));
    unroll<unit_steps(kL)>([&](auto t) __attribute__((always_inline)) {
      for (int i = 0; i < kParts; ++i)
        Isa::store_bytes(to + (u + t) * kBlockRows * Isa::kStep + i * kPartBytes,
                         expand<kL.code, decltype(t)::value>(at, i, table));
    });
  }
}
template <Layout kL>
__attribute__((noinline)) void widen_exact(const Packing& p, const uint8_t* block, int k0, int k1,
                                           uint8_t* panel) {
  const auto table = iq4_table();
  for_chunks<kL>(p, block, k0, k1,
                 [&](const auto&, const uint8_t* codes, int k, int) __attribute__((always_inline)) {
                   widen_chunk<kL>(codes, panel + static_cast<int64_t>(k - k0) * kBlockRows, table);
                 });
}

// What stands below the bytes of a rounded panel, in the same order (signed fragments: less 128), of the chunks of 64
// columns whose bits are set.
struct Fine {
  uint8_t* at = nullptr;
  uint64_t chunks = 0;
};

// The factors of a span: byte = high byte of code * mul + add.
template <Layout kL>
struct SpanRounding {
  typename Isa::U16 mul16, add16;
  KT_INLINE SpanRounding(const SpanFactors<kL>& f, int span, int row, int bias, typename Isa::F32 inverse) {
    const auto mul = Isa::round(Isa::mul(f.scale(span, row), inverse));
    auto add = Isa::set1(static_cast<int32_t>(128 + (Isa::kUnsigned ? 128 * 256 : 0)));
    if constexpr (kL.min == Min::kZero)
      add = Isa::sub(add, Isa::mul(f.zero(span, row), mul));
    else
      add = Isa::sub(add, Isa::mul(Isa::set1(static_cast<int32_t>(bias)), mul));
    if constexpr (kL.min == Min::kF16 || kL.min == Min::kS8F16)
      add = Isa::sub(add, Isa::round(Isa::mul(f.min(span, row), inverse)));
    mul16 = Isa::to_u16(mul), add16 = Isa::to_u16(add);
  }
};

// D of columns [k0, k1), for the rows of a part.
template <Layout kL>
KT_INLINE typename Isa::F32 panel_scale(const Packing& p, const uint8_t* block, int k0, int k1, int row) {
  auto reach = Isa::set1(0.0f);
  for_chunks<kL>(p, block, k0, k1,
                 [&](const auto& f, const uint8_t*, int, int in_record) __attribute__((always_inline)) {
                   for (int s = 0; s < kChunk; s += code_span(kL))
                     reach = Isa::max(reach, span_reach<kL>(f, (in_record + s) / p.span, row, p.format.bias));
                 });
  return Isa::mul(reach, Isa::set1(1.0f / 127));
}

// One part of a rounded panel; `scales` receives D for its rows.
template <Layout kL>
__attribute__((noinline)) void widen_rounded(const Packing& p, const uint8_t* block, int k0, int k1, int part,
                                             uint8_t* panel, float* scales, const Fine& fine) {
  constexpr int kSpan = code_span(kL), kSteps = kSpan / Isa::kStep;
  constexpr bool kWide = !small_codes(kL.code);
  using I = typename Late<Isa, kL.code>::type;
  const int row = part * Isa::kLanes;
  const auto d = panel_scale<kL>(p, block, k0, k1, row);
  Isa::store(scales, d);
  // 256 / D, and 0 for rows that are all zero (or so small that the quotient overflows: their D is below
  // 2^-118)
  const auto tiny = Isa::set1(0x1p-118f);
  const auto inverse = Isa::zero_below(Isa::div(Isa::set1(256.0f), Isa::max(d, tiny)), d, tiny);
  const auto table = iq4_table();
  // On signed fragments wide codes are made unsigned first, so that affine sees 0..255 everywhere.
  const int bias = p.bias + (kWide && !Isa::kUnsigned ? 128 : 0);
  for_chunks<kL>(
      p, block, k0, k1,
      [&](const auto& f, const uint8_t* codes, int k, int in_record) __attribute__((always_inline)) {
        const int64_t at_column = static_cast<int64_t>(k - k0) * kBlockRows + part * kPartBytes;
        alignas(64) uint8_t memory[kLookedUp<kL>];
        codes = chunk_codes<kL>(codes, memory);
        const auto chunk = [&](auto with_fine) __attribute__((always_inline)) {
          for (int u = 0; u < kChunk / Isa::kStep; u += unit_steps(kL)) {
            const CodesAt at = unit_at<kL>(codes, u / unit_steps(kL));
            unroll<(unit_steps(kL) + kSteps - 1) / kSteps>([&](auto s) __attribute__((always_inline)) {
              const SpanRounding<kL> by(f, (in_record + u * Isa::kStep + s * kSpan) / p.span, row, bias,
                                        inverse);
              constexpr int kFirst = decltype(s)::value * kSteps,
                            kEnd = kFirst + kSteps < unit_steps(kL) ? kFirst + kSteps : unit_steps(kL);
              unroll_from<kFirst, kEnd>([&](auto t) __attribute__((always_inline)) {
                auto w = expand<kL.code, decltype(t)::value>(at, part, table);
                if constexpr (kWide && !Isa::kUnsigned) w = Isa::flip_sign(w);
                const int64_t to = at_column + (u + t) * kBlockRows * Isa::kStep;
                Isa::store_bytes(panel + to, Isa::affine(w, by.mul16, by.add16));
                if constexpr (decltype(with_fine)::value) {
                  auto low = I::affine_low(w, by.mul16, by.add16);
                  if constexpr (!Isa::kUnsigned) low = Isa::flip_sign(low);
                  Isa::store_bytes(fine.at + to, low);
                }
              });
            });
          }
        };
        if (fine.chunks >> ((k - k0) / kChunk) & 1)
          chunk(Int<1>{});
        else
          chunk(Int<0>{});
      });
}

// f(column in panel, part, value as F32) for every column of [k0, k1): (code - bias) * scale - min.
template <Layout kL, class F>
KT_INLINE void for_values(const Packing& p, const uint8_t* block, int k0, int k1, F&& put) {
  constexpr int kSpan = code_span(kL);
  const auto table = iq4_table();
  constexpr bool kWide = !small_codes(kL.code);
  const int bias = p.bias + (kWide && !Isa::kUnsigned ? 128 : 0);
  for_chunks<kL>(
      p, block, k0, k1,
      [&](const auto& f, const uint8_t* codes, int k, int in_record) __attribute__((always_inline)) {
        alignas(64) uint8_t memory[kLookedUp<kL>];
        codes = chunk_codes<kL>(codes, memory);
        for (int part = 0; part < kParts; ++part) {
          const int row = part * Isa::kLanes;
          if constexpr (is_integer(kL.code)) {
            constexpr int kSteps = unit_steps(kL), kSpanSteps = kSpan / Isa::kStep;
            for (int u = 0; u < kChunk / Isa::kStep; u += kSteps) {
              const CodesAt at = unit_at<kL>(codes, u / kSteps);
              unroll<kSteps>([&](auto t) __attribute__((always_inline)) {
                const int span = (in_record + (u + t / kSpanSteps * kSpanSteps) * Isa::kStep) / p.span;
                const auto scale = f.scale(span, row), min = f.min(span, row);
                auto from = Isa::set1(static_cast<float>(bias));
                if constexpr (kL.min == Min::kZero) from = Isa::to_f32(f.zero(span, row));
                auto w = expand<kL.code, decltype(t)::value>(at, part, table);
                if constexpr (kWide && !Isa::kUnsigned) w = Isa::flip_sign(w);
                unroll<Isa::kStep>([&](auto j) __attribute__((always_inline)) {
                  auto v = Isa::mul(Isa::sub(Isa::template column<decltype(j)::value>(w), from), scale);
                  if constexpr (kL.min == Min::kF16 || kL.min == Min::kS8F16) v = Isa::sub(v, min);
                  put(k - k0 + (u + t) * Isa::kStep + j, part, v);
                });
              });
            }
          } else {
            for (int u = 0; u < kChunk; u += kFloatUnit) {
              const auto scale = f.scale((in_record + u) / p.span, row);
              unroll<kFloatUnit>([&](auto c) __attribute__((always_inline)) {
                auto v =
                    float_column<kL, decltype(c)::value>(codes + u / kFloatUnit * kFloatUnitBytes<kL>, part);
                if constexpr (code_factor(kL.code) != 1.0f) v = Isa::mul(v, Isa::set1(code_factor(kL.code)));
                if constexpr (kL.scale != Scale::kNone) v = Isa::mul(v, scale);
                put(k - k0 + u + c, part, v);
              });
            }
          }
        }
      });
}

// f32 panel: [column][16 rows]
template <Layout kL>
__attribute__((noinline)) void widen_f32(const Packing& p, const uint8_t* block, int k0, int k1,
                                         float* panel) {
  for_values<kL>(p, block, k0, k1,
                 [&](int column, int part, typename Isa::F32 v) __attribute__((always_inline)) {
                   Isa::store(panel + column * kBlockRows + part * Isa::kLanes, v);
                 });
}

// bf16 panel of E4M3 codes in pairs: a step is looked up (e4m3_bf16) and stands in the panel's order. One
// scale for all 16 rows (blocks of rows and columns) is folded into the tables, which are built anew when it
// changes: some 40 operations for 16 x 128 weights. Else the looked-up values, exact in bf16, are scaled row
// by row. Either way a weight is rounded as through f32: value * scale to f32, then to bf16.
template <Layout kL>
KT_INLINE void widen_pairs(const Packing& p, const uint8_t* block, int k0, int k1, uint8_t* panel) {
  using I = typename Late<Isa, kL.code>::type;
  static_assert(kParts == 1 && I::kStep == 4);
  constexpr int kSpan = code_span(kL), kStepBytes = kBlockRows * 4;
  float folded = 1.0f;
  auto table = I::e4m3_table(folded);
  for_chunks<kL>(
      p, block, k0, k1,
      [&](const auto& f, const uint8_t* codes, int k, int in_record) __attribute__((always_inline)) {
        uint8_t* to = panel + static_cast<int64_t>(k - k0) * kBlockRows * 2;
        for (int s = 0; s < kChunk; s += kSpan) {
          const auto scale = f.scale((in_record + s) / p.span, 0);
          const bool one = kL.scale == Scale::kF32 && I::all_equal(scale);
          const float fold = one ? I::max_of(scale) : 1.0f;
          if (bits_of(fold) != bits_of(folded)) table = I::e4m3_table(folded = fold);
          const uint8_t* from = codes + s * kBlockRows;
          typename I::Bytes w[2];
          if (one) {
            for (int t = 0; t < kSpan / 4; ++t, from += kStepBytes, to += 2 * kStepBytes) {
              I::e4m3_bf16(table, I::load_bytes(from), w);
              I::store_bytes(to, w[0]);
              I::store_bytes(to + kStepBytes, w[1]);
            }
          } else {
            for (int t = 0; t < kSpan / 4; ++t, from += kStepBytes) {
              I::e4m3_bf16(table, I::load_bytes(from), w);
              unroll<2>([&](auto h) __attribute__((always_inline)) {
                const typename I::F32 columns[2] = {I::mul(I::template column_bf16<0>(w[h]), scale),
                                                    I::mul(I::template column_bf16<1>(w[h]), scale)};
                I::store_bf16_step(to, columns);
                to += kStepBytes;
              });
            }
          }
        }
      });
}

// bf16 panel of integer codes in steps of four columns. A code stands in the top bits of the fraction of a number
// whose exponent makes it kAbove + code, so that a shift and a mask make a column, and one fma takes kAbove and the
// bias away and scales it; then the weight is rounded to bf16.
template <Layout kL>
KT_INLINE void widen_codes(const Packing& p, const uint8_t* block, int k0, int k1, uint8_t* panel) {
  using I = typename Late<Isa, kL.code>::type;
  static_assert(kParts == 1 && I::kStep == 4);
  constexpr int kBits = small_codes(kL.code) ? 7 : 8, kStepBytes = kBlockRows * 4;
  constexpr int kSteps = unit_steps(kL), kSpanSteps = code_span(kL) / 4;
  constexpr int kSome = kSpanSteps < kSteps ? kSpanSteps : kSteps;  // steps of a unit with one scale
  const auto table = iq4_table();
  for_chunks<kL>(
      p, block, k0, k1,
      [&](const auto& f, const uint8_t* codes, int k, int in_record) __attribute__((always_inline)) {
        uint8_t* to = panel + static_cast<int64_t>(k - k0) * kBlockRows * 2;
        alignas(64) uint8_t memory[kLookedUp<kL>];
        codes = chunk_codes<kL>(codes, memory);
        for (int u = 0; u < kChunk / 4; u += kSteps) {
          const CodesAt at = unit_at<kL>(codes, u / kSteps);
          unroll<kSteps / kSome>([&](auto s) __attribute__((always_inline)) {
            const int span = (in_record + (u + s * kSome) * 4) / p.span;
            const auto scale = f.scale(span, 0);
            auto from = I::set1(static_cast<float>(-(1 << kBits) - p.bias));
            if constexpr (kL.min == Min::kZero)
              from = I::sub(I::set1(static_cast<float>(-(1 << kBits))), I::to_f32(f.zero(span, 0)));
            auto start = I::mul(from, scale);
            if constexpr (kL.min == Min::kF16 || kL.min == Min::kS8F16) start = I::sub(start, f.min(span, 0));
            constexpr int kFirst = decltype(s)::value * kSome;
            unroll_from<kFirst, kFirst + kSome>([&](auto t) __attribute__((always_inline)) {
              const auto w = expand<kL.code, decltype(t)::value>(at, 0, table);
              unroll<2>([&](auto h) __attribute__((always_inline)) {
                constexpr int kJ = 2 * decltype(h)::value;
                const typename I::F32 columns[2] = {
                    I::fma(I::template column_above<kJ, kBits>(w), scale, start),
                    I::fma(I::template column_above<kJ + 1, kBits>(w), scale, start)};
                I::store_bf16_step(to + ((u + t) * 2 + h) * kStepBytes, columns);
              });
            });
          });
        }
      });
}

// bf16 panel in the packed order of bf16 codes
template <Layout kL>
__attribute__((noinline)) void widen_bf16(const Packing& p, const uint8_t* block, int k0, int k1,
                                          uint8_t* panel) {
  using I = typename Late<Isa, kL.code>::type;
  if constexpr (takes_bf16(kL)) {
    widen_pairs<kL>(p, block, k0, k1, panel);
  } else if constexpr (I::kBf16Product && is_integer(kL.code) && I::kStep == 4) {
    widen_codes<kL>(p, block, k0, k1, panel);
  } else if constexpr (I::kBf16Product) {  // through a strip of f32 columns
    constexpr int kStepK = Isa::kStep / 2;
    alignas(64) float strip[kChunk * kBlockRows];
    for (int k = k0; k < k1; k += kChunk) {
      widen_f32<kL>(p, block, k, k + kChunk, strip);
      for (int t = 0; t < kChunk / kStepK; ++t)
        for (int i = 0; i < kParts; ++i) {
          typename Isa::F32 columns[kStepK];
          for (int j = 0; j < kStepK; ++j)
            columns[j] = Isa::load(strip + (t * kStepK + j) * kBlockRows + i * Isa::kLanes);
          I::store_bf16_step(
              panel + static_cast<int64_t>(k - k0) * kBlockRows * 2 + (t * kParts + i) * kPartBytes, columns);
        }
    }
  }
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
