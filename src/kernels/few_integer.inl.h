// The passes of few.inl.h over integer codes, and what those over float codes share with them: parts of a row block,
// a span's factors, fetching ahead.
#pragma once
#include <type_traits>

#include "kernels/grids.inl.h"
#include "kernels/isa/inline.h"
#include "kernels/plan.h"
#include "kernels/table.h"

namespace KT_ISA_NAMESPACE {
namespace {

using namespace kt;

inline constexpr int kParts = kBlockRows / Isa::kLanes;
inline constexpr int kPartBytes = Isa::kLanes * Isa::kStep;

constexpr bool small_codes(Code code) { return code != Code::kI8 && code != Code::kIq4; }

alignas(16) constexpr int8_t kIq4Table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                              1,    13,   25,  38,  53,  69,  89,  113};
KT_INLINE typename Isa::Table iq4_table() {
  alignas(16) int8_t t[16];
  for (int i = 0; i < 16; ++i) t[i] = static_cast<int8_t>(kIq4Table[i] + (Isa::kUnsigned ? 128 : 0));
  return Isa::table(t);
}

// Chunks are walked in units: as many steps as share bytes in any plane, or make up a short span. Only a unit
// is unrolled.
constexpr int unit_steps(const Layout& layout) {
  const Planes p = planes(layout.code);
  int steps = p.low == 0 ? 4 : 8 / p.low;
  if (p.high && 8 / p.high > steps) steps = 8 / p.high;
  const int span = layout.span == SpanLength::kLong ? 0 : span_columns(layout.span) / Isa::kStep;
  return steps > span ? steps : span;
}
// Where unit `unit` of a chunk starts, in each plane.
struct CodesAt {
  const uint8_t *low, *high;
};
template <Layout kL>
KT_INLINE CodesAt unit_at(const uint8_t* chunk, int unit) {
  constexpr int kStepAll = kBlockRows * Isa::kStep, kSteps = unit_steps(kL);
  constexpr Planes kPlanes = planes(kL.code);
  constexpr int kLow = kPlanes.low ? kSteps * kPlanes.low / 8 : kSteps, kHigh = kSteps * kPlanes.high / 8;
  return {chunk + unit * kLow * kStepAll, chunk + low_plane_bytes(kL.code) + unit * kHigh * kStepAll};
}

// Step kT of a unit of integer codes as bytes, for one part of the row block.
template <Code kCode, int kT>
KT_INLINE typename Isa::Bytes expand(const CodesAt& at, int part, const typename Isa::Table& table) {
  constexpr int kStepAll = kBlockRows * Isa::kStep;
  constexpr Planes kPlanes = planes(kCode);
  const int row = part * kPartBytes;
  if constexpr (kPlanes.low == 0) {
    return Isa::load_bytes(at.low + kT * kStepAll + row);
  } else {
    constexpr int kShare = 8 / kPlanes.low;
    auto x = Isa::template field<kPlanes.low, kT % kShare * kPlanes.low, 0>(
        Isa::load_bytes(at.low + kT / kShare * kStepAll + row));
    if constexpr (kPlanes.high != 0) {
      constexpr int kShareHigh = 8 / kPlanes.high;
      x = Isa::bor(x, Isa::template field<kPlanes.high, kT % kShareHigh * kPlanes.high, kPlanes.low>(
                          Isa::load_bytes(at.high + kT / kShareHigh * kStepAll + row)));
    }
    if constexpr (kCode == Code::kIq4) x = Isa::lookup(table, x);
    return x;
  }
}

// Scales, mins and zeros of one span, kLanes rows from row `row` of the block.
template <Layout kL>
struct SpanFactors {
  const uint8_t* header;
  Header h;
  KT_INLINE SpanFactors(const uint8_t* record, int spans) : header(record), h(header_of(kL, spans)) {}
  KT_INLINE typename Isa::F32 scale(int span, int row) const {
    const uint8_t* at = header + h.scales + (span * kBlockRows + row) * scale_bytes(kL.scale);
    if constexpr (kL.scale == Scale::kF32)
      return Isa::load(reinterpret_cast<const float*>(at));
    else if constexpr (kL.scale == Scale::kBf16)
      return Isa::load_bf16(at);
    else if constexpr (kL.scale == Scale::kF16)
      return Isa::load_f16(at);
    else if constexpr (kL.scale == Scale::kE8m0)
      return Isa::load_e8m0(at);
    else if constexpr (kL.scale == Scale::kS8F16)
      return scale_of(unit_factor(row), span, row);
    else if constexpr (kL.scale == Scale::kE4m3)
      return Isa::load_ue4m3(at);
    else
      return Isa::set1(1.0f);
  }
  // Of integer scales, with their factor.
  KT_INLINE typename Isa::F32 scale_of(typename Isa::F32 factor, int span, int row) const {
    return Isa::mul(factor, Isa::to_f32(Isa::load_s8(header + h.scales + span * kBlockRows + row)));
  }
  // Exact: the unit is a power of two.
  KT_INLINE typename Isa::F32 unit_factor(int row) const {
    const auto factor = Isa::load_f16(header + h.supers + row * 2);
    if constexpr (code_unit(kL.code) != 1.0f) return Isa::mul(factor, Isa::set1(code_unit(kL.code)));
    return factor;
  }
  KT_INLINE typename Isa::F32 min(int span, int row) const {
    const uint8_t* at = header + h.mins + (span * kBlockRows + row) * min_bytes(kL.min);
    if constexpr (kL.min == Min::kF16)
      return Isa::load_f16(at);
    else if constexpr (kL.min == Min::kS8F16)
      return Isa::mul(Isa::load_f16(header + h.super_mins + row * 2), Isa::to_f32(Isa::load_s8(at)));
    else
      return Isa::set1(0.0f);
  }
  KT_INLINE typename Isa::I32 zero(int span, int row) const {
    return Isa::load_u8(header + h.mins + (span * kBlockRows + row));
  }
};

// What a span takes for each unit of its values' sum.
template <Layout kL>
KT_INLINE typename Isa::F32 min_of(const SpanFactors<kL>& factors, int span, int row) {
  if constexpr (kL.min == Min::kZero)
    return Isa::mul(factors.scale(span, row), Isa::to_f32(factors.zero(span, row)));
  else
    return factors.min(span, row);
}
// Whether sums of products are 32-bit numbers of one row of activations each, which may start from any number.
constexpr bool starts_from_sums() { return std::is_same_v<typename Isa::Acc, typename Isa::I32>; }

// Fetches the `bytes` that lie kPrefetch bytes behind `at`; past the end of this call's blocks, what the
// caller reads next. Other workers' blocks lie behind ours: fetching those would cost memory bandwidth twice.
KT_INLINE void fetch_ahead(const MultiplyArgs& args, const uint8_t* at, int bytes) {
  if constexpr (Isa::kPrefetch > 0) {
    const auto* end = reinterpret_cast<const uint8_t*>(args.blocks) +
                      args.count * static_cast<int64_t>(args.packing->block_bytes);
    const uint8_t* ahead = at + Isa::kPrefetch;
    if (ahead >= end) {
      if (!args.after) return;
      ahead = reinterpret_cast<const uint8_t*>(args.after) + (ahead - end);
    }
    for (int i = 0; i < bytes; i += 64) Isa::prefetch(ahead + i);
  }
}

// One pass: kM tokens from row m0, kPP parts from part p0, over all of one row block.
template <Layout kL, int kM, int kPP>
struct FewInteger {
  static constexpr int kGroups = (kM + Isa::kTokens - 1) / Isa::kTokens;
  static constexpr bool kLong = kL.span == SpanLength::kLong;
  static constexpr int kSpan = kLong ? kChunk : span_columns(kL.span);  // columns that share a weight's scale
  // Sums start from what the bias takes.
  static constexpr bool kStarts = kL.min == Min::kNone && starts_from_sums();
  static constexpr int kUnitColumns = unit_steps(kL) * Isa::kStep;
  // Independent sums where there would be too few to hide the dot product's latency; integers add up the
  // same.
  static constexpr int kChains = kPP * kGroups == 1 ? 2 : 1;
  using Acc = typename Isa::Acc;
  using F32 = typename Isa::F32;

  const MultiplyArgs& args;
  const Packing& p = *args.packing;
  const int m0, p0;
  const typename Isa::Table table = iq4_table();
  const ActShape& s = args.acts.shape;
  const int64_t beside = s.scale_step(m0);  // rows whose scales and sums stand side by side
  const float* scales = args.acts.scales + s.scale_at(m0, s.scale_spans());
  const int64_t first_sum = s.scale_at(m0, s.sum_spans());
  F32 total[kPP][kM], part[kPP][kM];  // part: of a span of the weights, before its scale
  // The factors of a record, where registers are left for them.
  static constexpr bool kKeepsFactors = kL.scale == Scale::kS8F16 && kPP * kM <= 2;
  F32 factor[kKeepsFactors ? kPP : 1];

  KT_INLINE FewInteger(const MultiplyArgs& a, int row, int first_part) : args(a), m0(row), p0(first_part) {
    each_sum([&](auto i, auto j)
                 __attribute__((always_inline)) { total[i][j] = part[i][j] = Isa::set1(0.0f); });
  }
  template <class F>
  static KT_INLINE void each_sum(F&& f) {
    unroll<kPP * kM>([&](auto at) __attribute__((always_inline)) { f(Int<at / kM>{}, Int<at % kM>{}); });
  }
  template <class F>
  static KT_INLINE void each_acc(F&& f) {
    unroll<kPP * kGroups>(
        [&](auto at) __attribute__((always_inline)) { f(Int<at / kGroups>{}, Int<at % kGroups>{}); });
  }

  KT_INLINE const int8_t* act(int group, int column) const {
    return reinterpret_cast<const int8_t*>(args.acts.codes) +
           static_cast<int64_t>(m0 + group * Isa::kActRows) * p.k_pad +
           static_cast<int64_t>(column) * Isa::kActRows;
  }

  // acc += steps [kFrom, kTo) of the unit at `codes`, whose first column is `column`
  template <int kFrom, int kTo>
  KT_INLINE void steps(Acc (&acc)[kChains][kPP][kGroups], const CodesAt& codes, int column) const {
    unroll_from<kFrom, kTo>([&](auto t) __attribute__((always_inline)) {
      typename Isa::Act a[kGroups];
      unroll<kGroups>([&](auto g) __attribute__((always_inline)) {
        a[g] = Isa::load_act(act(g, column + t * Isa::kStep));
      });
      unroll<kPP>([&](auto i) __attribute__((always_inline)) {
        const auto w = expand<kL.code, decltype(t)::value>(codes, p0 + i, table);
        unroll<kGroups>([&](auto g) __attribute__((always_inline)) {
          Isa::template dot<small_codes(kL.code)>(acc[t % kChains][i][g], w, a[g]);
        });
      });
    });
  }

  KT_INLINE void start(Acc (&acc)[kChains][kPP][kGroups], int64_t at) const {
    unroll<kChains>([&](auto c) __attribute__((always_inline)) {
      each_acc([&](auto i, auto g) __attribute__((always_inline)) {
        if constexpr (kStarts && c == 0)
          acc[c][i][g] = Isa::set1(args.acts.sums[first_sum + at * beside + g]);
        else
          acc[c][i][g] = Isa::zero_acc();
      });
    });
  }

  // part += acc of kActSpan columns, the `at`th of the row
  KT_INLINE void fold(const Acc (&acc)[kChains][kPP][kGroups], int64_t at) {
    each_sum([&](auto i, auto j) __attribute__((always_inline)) {
      auto dot = Isa::template total<j % Isa::kTokens>(acc[0][i][j / Isa::kTokens]);
      if constexpr (kChains == 2)
        dot = Isa::add(dot, Isa::template total<j % Isa::kTokens>(acc[1][i][j / Isa::kTokens]));
      if constexpr (kL.min == Min::kNone && !kStarts)
        dot = Isa::add(dot, Isa::set1(args.acts.sums[first_sum + at * beside + j]));
      part[i][j] = Isa::fma(Isa::to_f32(dot), Isa::set1(scales[at * beside + j]), part[i][j]);
    });
  }

  // total += part, scaled as span `span` of the record is
  KT_INLINE void finish(const SpanFactors<kL>& factors, int span) {
    unroll<kPP>([&](auto i) __attribute__((always_inline)) {
      const int row = (p0 + i) * Isa::kLanes;
      F32 w;
      if constexpr (kKeepsFactors)
        w = factors.scale_of(factor[i], span, row);
      else
        w = factors.scale(span, row);
      unroll<kM>([&](auto j) __attribute__((always_inline)) {
        total[i][j] = Isa::fma(part[i][j], w, total[i][j]);
        part[i][j] = Isa::set1(0.0f);
      });
    });
  }
  // The mins of span `span` of the record, the `at`th of the row.
  KT_INLINE void take_mins(const SpanFactors<kL>& factors, int span, int64_t at) {
    if constexpr (kL.min != Min::kNone)
      unroll<kPP>([&](auto i) __attribute__((always_inline)) {
        const F32 min = min_of<kL>(factors, span, (p0 + i) * Isa::kLanes);
        unroll<kM>([&](auto j) __attribute__((always_inline)) {
          total[i][j] = Isa::fma(min, Isa::set1(-args.acts.values[first_sum + at * beside + j]), total[i][j]);
        });
      });
  }

  // part += columns [u, u + kActSpan) of a chunk that begins at `column`
  template <int kFrom>
  KT_INLINE void step_span(const uint8_t* chunk, int u, int column) {
    constexpr int kSteps = kActSpan / Isa::kStep;
    const int64_t at = (column + u) / kActSpan;
    Acc acc[kChains][kPP][kGroups];
    start(acc, at);
    if constexpr (kUnitColumns >= kActSpan)
      steps<kFrom, kFrom + kSteps>(acc, unit_at<kL>(chunk, u / kUnitColumns),
                                   column + u / kUnitColumns * kUnitColumns);
    else
      unroll<kActSpan / kUnitColumns>([&](auto v) __attribute__((always_inline)) {
        steps<0, unit_steps(kL)>(acc, unit_at<kL>(chunk, u / kUnitColumns + v),
                                 column + u + v * kUnitColumns);
      });
    fold(acc, at);
  }

  KT_INLINE void walk(const uint8_t* at) {
    constexpr int kPiece = kUnitColumns > kActSpan ? kUnitColumns : kActSpan;
    static_assert(kPiece % kActSpan == 0 && kChunk % kPiece == 0);
    const int spans_per_record = p.record_k / p.span;
    int64_t row_span = 0;  // spans of the row that have ended
    alignas(64) uint8_t memory[kLookedUp<kL>];
    for (int k0 = 0; k0 < p.k_pad; k0 += p.record_k) {
      const SpanFactors<kL> factors(at, spans_per_record);
      fetch_ahead(args, at, p.header_bytes);
      if constexpr (kKeepsFactors)
        unroll<kPP>([&](auto i) __attribute__((always_inline)) {
          factor[i] = factors.unit_factor((p0 + i) * Isa::kLanes);
        });
      at += p.header_bytes;
      const int columns = p.k_pad - k0 < p.record_k ? p.k_pad - k0 : p.record_k;
      int span = 0;
      for (int c = 0, next = p.span; c < columns; c += kChunk, at += chunk_bytes(kL.code)) {
        fetch_ahead(args, at, chunk_bytes(kL.code));
        const uint8_t* codes = chunk_codes<kL>(at, memory);
        for (int u = 0; u < kChunk; u += kPiece)
          unroll<kPiece / kActSpan>([&](auto s) __attribute__((always_inline)) {
            step_span<s * kActSpan / Isa::kStep>(codes, u + s * kActSpan, k0 + c);
            if constexpr (!kLong && (kSpan == kActSpan || s % 2 == 1)) {
              finish(factors, span);
              take_mins(factors, span++, row_span++);
            }
          });
        if constexpr (kLong) {
          const bool ends = c + kChunk == next || c + kChunk == columns;
          if (ends || (k0 + c + kChunk) % kExactK == 0) finish(factors, span);
          if (ends) take_mins(factors, span++, row_span++), next += p.span;
        }
      }
    }
  }

  KT_INLINE void put(float* out) const {
    each_sum([&](auto i, auto j) __attribute__((always_inline)) {
      if (m0 + j < args.m) Isa::store(out + (m0 + j) * args.ld + (p0 + i) * Isa::kLanes, total[i][j]);
    });
  }
};

template <Layout kL, int kM>
void few_integer_pass(const MultiplyArgs& args, int m0) {
  constexpr int kPP = Isa::few_parts((kM + Isa::kTokens - 1) / Isa::kTokens);
  for (int b = 0; b < args.count; ++b) {
    const auto* block = reinterpret_cast<const uint8_t*>(args.blocks) + b * args.packing->block_bytes;
    for (int p0 = 0; p0 < kParts; p0 += kPP) {
      FewInteger<kL, kM, kPP> pass(args, m0, p0);
      pass.walk(block);
      pass.put(args.out + b * kBlockRows);
    }
  }
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
