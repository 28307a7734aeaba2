// The passes of few.inl.h over float codes.
#pragma once
#include "kernels/few_integer.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

inline constexpr int kFloatUnit = 8;  // columns of float codes unrolled together
template <Layout kL>
constexpr int kFloatUnitBytes = chunk_bytes(kL.code) * kFloatUnit / kChunk;

// The activations `few` takes.
constexpr bool takes_bf16(const Layout& layout) {
  return in_pairs(layout.code, Isa::kStep) && Isa::kBf16Product;
}
constexpr ActCode few_acts(const Layout& layout) {
  return is_integer(layout.code) ? ActCode::kS8 : takes_bf16(layout) ? ActCode::kBf16 : ActCode::kF32;
}

// What float_column leaves out of the value, a power of two.
constexpr float code_factor(Code code) { return code == Code::kE4m3 ? 256.0f : 1.0f; }

// Column kC of a unit of float codes, kLanes rows of one part, before any scale; value / code_factor.
template <Layout kL, int kC>
KT_INLINE typename Isa::F32 float_column(const uint8_t* codes, int part) {
  const int row = part * Isa::kLanes;
  if constexpr (kL.code == Code::kBf16) {
    constexpr int kStepK = Isa::kStep / 2;
    return Isa::template column_bf16<kC % kStepK>(
        Isa::load_bytes(codes + kC / kStepK * kBlockRows * Isa::kStep + part * kPartBytes));
  } else if constexpr (kL.code == Code::kF16) {
    return Isa::load_f16(codes + (kC * kBlockRows + row) * 2);
  } else if constexpr (kL.code == Code::kF32) {
    return Isa::load(reinterpret_cast<const float*>(codes) + kC * kBlockRows + row);
  } else if constexpr (in_pairs(kL.code, Isa::kStep)) {
    using I = typename Late<Isa, kC>::type;
    return I::template column_e4m3<kC % Isa::kStep>(
        I::load_bytes(codes + kC / Isa::kStep * kBlockRows * Isa::kStep + part * kPartBytes));
  } else if constexpr (kL.code == Code::kE4m3) {
    return Late<Isa, kC>::type::load_e4m3(codes + kC * kBlockRows + row);
  } else {
    return Isa::template load_e2m1 < kC % 2 == 1 > (codes + kC / 2 * kBlockRows + row);
  }
}

struct NoTable {};
template <Layout kL>
KT_INLINE auto code_table() {
  if constexpr (takes_bf16(kL))
    return Late<Isa, kL.code>::type::e4m3_table(1.0f);
  else
    return NoTable{};
}

// One pass of float codes: kM rows of activations, kPP parts, all of one row block.
template <Layout kL, int kM, int kPP>
struct FewFloat {
  using F32 = typename Isa::F32;
  static constexpr bool kBf16Acts = takes_bf16(kL);
  // Independent sums, to hide the latency: the FMA's of 4 cycles, or the bf16 product's of 6, twice a step
  // and sum.
  static constexpr int kChains = kM * kPP >= (kBf16Acts ? 8 : 4) ? 1 : kM * kPP == 1 ? 4 : 2;
  static constexpr bool kScaled = kL.scale != Scale::kNone;
  static constexpr bool kWide = Isa::kWideColumns && kPP > 1 &&
                                (kL.code == Code::kE4m3 || kL.code == Code::kE2m1);
  static constexpr float kFactor = kBf16Acts ? 1.0f : code_factor(kL.code);

  const MultiplyArgs& args;
  const Packing& p = *args.packing;
  const int m0, p0;
  const decltype(code_table<kL>()) table = code_table<kL>();
  F32 total[kPP][kM];
  F32 acc[kChains][kPP][kM];

  KT_INLINE FewFloat(const MultiplyArgs& a, int row, int part) : args(a), m0(row), p0(part) {
    each_sum([&](auto i, auto j) __attribute__((always_inline)) { total[i][j] = Isa::set1(0.0f); });
    clear();
  }
  template <class F>
  static KT_INLINE void each_sum(F&& f) {
    unroll<kPP * kM>([&](auto at) __attribute__((always_inline)) { f(Int<at / kM>{}, Int<at % kM>{}); });
  }
  KT_INLINE void clear() {
    unroll<kChains>([&](auto c) __attribute__((always_inline)) {
      each_sum([&](auto i, auto j) __attribute__((always_inline)) { acc[c][i][j] = Isa::set1(0.0f); });
    });
  }

  // acc += the unit of kFloatUnit columns at `codes`, the first of which is `first`
  KT_INLINE void columns(const uint8_t* codes, int first) {
    if constexpr (kBf16Acts)
      bf16_columns(codes, first);
    else
      f32_columns(codes, first);
  }
  KT_INLINE void f32_columns(const uint8_t* codes, int first) {
    const auto* a =
        reinterpret_cast<const float*>(args.acts.codes) + static_cast<int64_t>(m0) * p.k_pad + first;
    unroll<kFloatUnit>([&](auto at) __attribute__((always_inline)) {
      // columns 0 and 2 of a step in pairs come from one register, so one after the other
      constexpr int kAt = decltype(at)::value,
                    c = in_pairs(kL.code, Isa::kStep) ? kAt / 4 * 4 + kAt % 2 * 2 + kAt / 2 % 2 : kAt;
      F32 w[kPP];
      wide_or_single<c>(codes, w);
      unroll<kM>([&](auto j) __attribute__((always_inline)) {
        const F32 x = Isa::set1(a[j * static_cast<int64_t>(p.k_pad) + c]);
        unroll<kPP>([&](auto i) __attribute__((always_inline)) {
          acc[kAt % kChains][i][j] = Isa::fma(w[i], x, acc[kAt % kChains][i][j]);
        });
      });
    });
  }
  // Column kC of all parts.
  template <int kC>
  KT_INLINE void wide_or_single(const uint8_t* codes, F32 (&w)[kPP]) {
    using I = typename Late<Isa, kC>::type;
    const int row = p0 * Isa::kLanes;
    if constexpr (kWide && kL.code == Code::kE4m3)
      I::wide_e4m3(codes + kC * kBlockRows + row, w);
    else if constexpr (kWide)
      I::template wide_e2m1<kC % 2 == 1>(codes + kC / 2 * kBlockRows + row, w);
    else
      unroll<kPP>([&](auto i) __attribute__((always_inline)) { w[i] = float_column<kL, kC>(codes, p0 + i); });
  }
  // A step of 4 columns is two of bf16 codes: columns 0 and 1, columns 2 and 3.
  KT_INLINE void bf16_columns(const uint8_t* codes, int first) {
    using I = typename Late<Isa, kM>::type;
    static_assert(I::kActRows == 1);
    const auto* a =
        reinterpret_cast<const int8_t*>(args.acts.codes) + (static_cast<int64_t>(m0) * p.k_pad + first) * 2;
    unroll<kFloatUnit / Isa::kStep>([&](auto t) __attribute__((always_inline)) {
      unroll<kPP>([&](auto i) __attribute__((always_inline)) {
        typename I::Bytes w[2];
        I::e4m3_bf16(table, I::load_bytes(codes + t * kBlockRows * Isa::kStep + (p0 + i) * kPartBytes), w);
        unroll<2>([&](auto h) __attribute__((always_inline)) {
          constexpr int kPair = 2 * decltype(t)::value + decltype(h)::value;
          unroll<kM>([&](auto j) __attribute__((always_inline)) {
            I::dot_bf16(acc[kPair % kChains][i][j], w[h],
                        I::load_act(a + j * static_cast<int64_t>(p.k_pad) * 2 + kPair * 4));
          });
        });
      });
    });
  }

  KT_INLINE void finish(const SpanFactors<kL>& factors, int span) {
    each_sum([&](auto i, auto j) __attribute__((always_inline)) {
      F32 sum = acc[0][i][j];
      unroll_from<1, kChains>([&](auto c)
                                  __attribute__((always_inline)) { sum = Isa::add(sum, acc[c][i][j]); });
      if constexpr (kFactor != 1.0f) sum = Isa::mul(sum, Isa::set1(kFactor));
      if constexpr (kScaled)
        total[i][j] = Isa::fma(sum, factors.scale(span, (p0 + i) * Isa::kLanes), total[i][j]);
      else
        total[i][j] = sum;
    });
  }

  KT_INLINE void walk(const uint8_t* at) {
    const int spans_per_record = p.record_k / p.span;
    for (int k0 = 0; k0 < p.k_pad; k0 += p.record_k) {
      const SpanFactors<kL> factors(at, spans_per_record);
      fetch_ahead(args, at, p.header_bytes);
      at += p.header_bytes;
      const int width = p.k_pad - k0 < p.record_k ? p.k_pad - k0 : p.record_k;
      if constexpr (kL.span == SpanLength::kLong) {
        for (int s = 0, span = 0; s < width; s += p.span, ++span) {
          const int end = width - s < p.span ? width : s + p.span;
          for (int c = s; c < end; c += kChunk, at += chunk_bytes(kL.code)) {
            fetch_ahead(args, at, chunk_bytes(kL.code));
            for (int u = 0; u < kChunk; u += kFloatUnit)
              columns(at + u / kFloatUnit * kFloatUnitBytes<kL>, k0 + c + u);
          }
          finish(factors, span);
          if constexpr (kScaled) clear();
        }
      } else {
        constexpr int kSpan = span_columns(kL.span);
        for (int c = 0; c < width; c += kChunk, at += chunk_bytes(kL.code)) {
          fetch_ahead(args, at, chunk_bytes(kL.code));
          for (int s = 0; s < kChunk; s += kSpan) {
            for (int u = s; u < s + kSpan; u += kFloatUnit)
              columns(at + u / kFloatUnit * kFloatUnitBytes<kL>, k0 + c + u);
            finish(factors, (c + s) / kSpan);
            if constexpr (kScaled) clear();
          }
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

// Where a step of bf16 codes is four columns of one row after another, its rows are taken as they lie: each has sums of
// its own, one for each column of the step, which are added at the end.
template <Layout kL>
constexpr bool takes_rows() {
  return kL.code == Code::kBf16 && Isa::kBf16Rows;
}
template <int kM, int kPP>
struct FewBf16Rows {
  using I = typename Late<Isa, kM>::type;
  static constexpr int kRows = I::kLanes, kColumns = I::kStep / 2;
  static_assert(kRows == 4 && kColumns == 4);

  static KT_INLINE void run(const MultiplyArgs& args, const uint8_t* block, int m0, int p0, float* out) {
    const Packing& p = *args.packing;
    const auto* a = reinterpret_cast<const float*>(args.acts.codes) + static_cast<int64_t>(m0) * p.k_pad;
    typename I::F32 sum[kPP][kM][kRows];
    unroll<kPP * kM * kRows>([&](auto i) __attribute__((always_inline)) {
      sum[i / kRows / kM][i / kRows % kM][i % kRows] = I::set1(0.0f);
    });
    const uint8_t* at = block + p.header_bytes;
    for (int c = 0; c < p.k_pad; c += kColumns, at += kBlockRows * I::kStep) {
      // Two lines at a time: with a chunk's 32 at once a core with few buffers waited (N1: 40 % of the limit for 70).
      fetch_ahead(args, at, kBlockRows * I::kStep);
      typename I::F32 x[kM];
      unroll<kM>([&](auto j) __attribute__((always_inline)) {
        x[j] = I::load(a + j * static_cast<int64_t>(p.k_pad) + c);
      });
      unroll<kPP>([&](auto i) __attribute__((always_inline)) {
        typename I::F32 w[kRows];
        I::rows_bf16(I::load_bytes(at + (p0 + i) * kPartBytes), w);
        unroll<kM * kRows>([&](auto r) __attribute__((always_inline)) {
          auto& to = sum[i][r / kRows][r % kRows];
          to = I::fma(w[r % kRows], x[r / kRows], to);
        });
      });
    }
    unroll<kPP * kM>([&](auto i) __attribute__((always_inline)) {
      if (m0 + i % kM < args.m)
        I::store(out + (m0 + i % kM) * args.ld + (p0 + i / kM) * kRows, I::sums_of(sum[i / kM][i % kM]));
    });
  }
};

template <int kM>
__attribute__((noinline)) void few_bf16_rows_pass(const MultiplyArgs& args, int m0) {
  constexpr int kPP = 4 / kM;  // 16 sums
  for (int b = 0; b < args.count; ++b) {
    const auto* block = reinterpret_cast<const uint8_t*>(args.blocks) + b * args.packing->block_bytes;
    for (int p0 = 0; p0 < kParts; p0 += kPP)
      FewBf16Rows<kM, kPP>::run(args, block, m0, p0, args.out + b * kBlockRows);
  }
}

// Not inlined: g++ allocates registers better for one pass at a time, and spilled in the inner loop of four.
template <Layout kL, int kM>
__attribute__((noinline)) void few_float_pass(const MultiplyArgs& args, int m0) {
  if constexpr (takes_rows<kL>()) {
    constexpr int kAtOnce = kM < 4 ? kM : 4;
    for (int m = 0; m < kM; m += kAtOnce) few_bf16_rows_pass<kAtOnce>(args, m0 + m);
    return;
  }
  constexpr int kPP = Isa::few_parts(kM);
  for (int b = 0; b < args.count; ++b) {
    const auto* block = reinterpret_cast<const uint8_t*>(args.blocks) + b * args.packing->block_bytes;
    for (int p0 = 0; p0 < kParts; p0 += kPP) {
      FewFloat<kL, kM, kPP> pass(args, m0, p0);
      pass.walk(block);
      pass.put(args.out + b * kBlockRows);
    }
  }
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
