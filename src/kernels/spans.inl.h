// Many rows, exactly: what `few` computes, to the bit, for any number of rows. Codes are widened into a panel as they
// are, and sums of whole numbers are scaled after every span of columns, by the weights' scale and the activations'.
// Scaling takes three or four operations for the eight products of 32 columns and four bytes a step; with panels
// rounded to one scale for 512 columns, which would save them, models with outlier channels lose 3 % of perplexity.
#pragma once
#include <type_traits>

#include "kernels/many.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

template <Layout kL>
struct ProductSpans {
  static constexpr int kCodeBytes = 1;
  static constexpr int kSpan = fold_span(kL), kSpans = kExactK / kSpan;
  static constexpr bool kMins = kL.min == Min::kF16 || kL.min == Min::kS8F16;
  static constexpr bool kZeros = kL.min == Min::kZero;
  // Sums start from what the bias takes.
  static constexpr bool kStarts = !kZeros && std::is_same_v<typename Isa::Acc, typename Isa::I32>;
  // Half of what a tile of plain products takes: sums of whole numbers and their totals share the registers.
  static constexpr int kGroups = Isa::kTileGroups / 2, kRows = kGroups * Isa::kTokens;
  using F32 = typename Isa::F32;

  // Of the spans of a panel, for its rows.
  struct alignas(64) Factors {
    float scale[kSpans][kPanelRows];
    float min[kMins ? kSpans : 1][kPanelRows];
    int32_t zero[kZeros ? kSpans : 1][kPanelRows];
  };
  static_assert(kPanelRows * kExactK + sizeof(Factors) <= kPanelBytes);

  static __attribute__((noinline)) void read(const Packing& p, const PanelWork& w, Factors& to) {
    for (int b = 0; b < w.panel.blocks; ++b) {
      int at = 0;
      for_chunks<kL>(p, w.block + b * static_cast<int64_t>(p.block_bytes), w.k0, w.k1,
                     [&](const auto& f, const uint8_t*, int, int in_record) __attribute__((always_inline)) {
                       for (int s = 0; s < kChunk; s += kSpan, ++at)
                         for (int i = 0; i < kParts; ++i) {
                           const int span = (in_record + s) / p.span, row = i * Isa::kLanes;
                           const int column = b * kBlockRows + row;
                           Isa::store(to.scale[at] + column, f.scale(span, row));
                           if constexpr (kMins) Isa::store(to.min[at] + column, f.min(span, row));
                           if constexpr (kZeros) Isa::store(to.zero[at] + column, f.zero(span, row));
                         }
                     });
    }
  }

  // Of kRows rows of activations, by span: their scale, and what a span's sum of codes takes from the products.
  struct Tokens {
    float scale[kRows][kSpans];
    int32_t sum[kRows][kSpans];            // times - bias, where that is one for all rows
    float min[kRows][kMins ? kSpans : 1];  // - scale * sum
  };
  static KT_INLINE void read(const MultiplyArgs& args, int row, int k0, int spans, Tokens& to) {
    const ActShape& s = args.acts.shape;
    const int bias = args.packing->bias;
    for (int j = 0; j < kRows; ++j) {
      const float* scale = args.acts.scales + static_cast<int64_t>(row + j) * s.scale_spans() + k0 / kActSpan;
      const int32_t* sum = args.acts.sums + static_cast<int64_t>(row + j) * s.sum_spans() + k0 / kSpan;
      for (int i = 0; i < spans; ++i) {
        to.scale[j][i] = scale[i * kSpan / kActSpan];
        to.sum[j][i] = kZeros ? sum[i] : -bias * sum[i];
        if constexpr (kMins) to.min[j][i] = -to.scale[j][i] * static_cast<float>(sum[i]);
      }
    }
  }

  // c [kRows, kNP parts] (+)= one tile over `spans` spans; the order of operations is that of FewInteger::finish.
  template <int kNP>
  static KT_INLINE void tile(const int8_t* a, int64_t a_stride, const uint8_t* b, int64_t block_stride,
                             int spans, const Tokens& tokens, const Factors& factors, int column, float* c,
                             bool first) {
    F32 total[kNP][kRows];
    unroll<kNP * kRows>([&](auto at) __attribute__((always_inline)) {
      constexpr int i = at / kRows, j = at % kRows;
      total[i][j] = first ? Isa::set1(0.0f) : Isa::load(c + j * kPanelRows + i * Isa::kLanes);
    });
    for (int s = 0; s < spans; ++s) {
      typename Isa::Acc acc[kNP][kGroups];
      unroll<kNP * kGroups>([&](auto at) __attribute__((always_inline)) {
        if constexpr (kStarts)
          acc[at / kGroups][at % kGroups] = Isa::set1(tokens.sum[at % kGroups][s]);
        else
          acc[at / kGroups][at % kGroups] = Isa::zero_acc();
      });
      for (int k = s * kSpan; k < (s + 1) * kSpan; k += Isa::kStep) {
        typename Isa::Bytes w[kNP];
        unroll<kNP>([&](auto i) __attribute__((always_inline)) {
          w[i] = Isa::load_bytes(b + i / kParts * block_stride + k * kBlockRows + i % kParts * kPartBytes);
        });
        unroll<kGroups>([&](auto g) __attribute__((always_inline)) {
          const auto x = Isa::load_act(a + g * a_stride + k * Isa::kActRows);
          unroll<kNP>([&](auto i) __attribute__((always_inline)) {
            Isa::template dot<small_codes(kL.code)>(acc[i][g], w[i], x);
          });
        });
      }
      unroll<kNP>([&](auto i) __attribute__((always_inline)) {
        const int at = column + i * Isa::kLanes;
        const F32 scale = Isa::load(factors.scale[s] + at);
        unroll<kRows>([&](auto j) __attribute__((always_inline)) {
          auto dot = Isa::template total<j % Isa::kTokens>(acc[i][j / Isa::kTokens]);
          if constexpr (kZeros)
            dot = Isa::sub(dot, Isa::mul(Isa::load(factors.zero[s] + at), Isa::set1(tokens.sum[j][s])));
          else if constexpr (!kStarts)
            dot = Isa::add(dot, Isa::set1(tokens.sum[j][s]));
          total[i][j] =
              Isa::fma(Isa::to_f32(dot), Isa::mul(scale, Isa::set1(tokens.scale[j][s])), total[i][j]);
          if constexpr (kMins)
            total[i][j] = Isa::fma(Isa::load(factors.min[s] + at), Isa::set1(tokens.min[j][s]), total[i][j]);
        });
      });
    }
    unroll<kNP * kRows>([&](auto at) __attribute__((always_inline)) {
      constexpr int i = at / kRows, j = at % kRows;
      Isa::store(c + j * kPanelRows + i * Isa::kLanes, total[i][j]);
    });
  }

  static __attribute__((noinline)) void multiply(const MultiplyArgs& args, const PanelWork& w) {
    constexpr int kNP = Isa::kTileParts;
    const int k_pad = args.packing->k_pad, spans = (w.k1 - w.k0) / kSpan;
    const bool first = w.k0 == 0, last = w.k1 == k_pad;
    auto& factors = *reinterpret_cast<Factors*>(args.scratch + kPanelRows * kExactK);
    read(*args.packing, w, factors);
    for (int i = 0; i < w.rows; i += kRows) {
      Tokens tokens;
      read(args, w.row0 + i, w.k0, spans, tokens);
      float* c =
          reinterpret_cast<float*>(w.sums) + (first && last ? 0 : static_cast<int64_t>(i) * kPanelRows);
      const auto* a = reinterpret_cast<const int8_t*>(args.acts.codes) +
                      static_cast<int64_t>(w.row0 + i) * k_pad + static_cast<int64_t>(w.k0) * Isa::kActRows;
      const int64_t a_stride = int64_t{k_pad} * Isa::kActRows;
      for (int p = 0; p < w.panel.blocks * kParts; p += kNP) {
        const uint8_t* b = w.panel.at + p / kParts * w.panel.stride + p % kParts * kPartBytes;
        if (kNP > kParts && w.panel.blocks == 1)
          tile < kNP<kParts ? kNP : kParts>(a, a_stride, b, w.panel.stride, spans, tokens, factors,
                                            p * Isa::kLanes, c + p * Isa::kLanes, first);
        else
          tile<kNP>(a, a_stride, b, w.panel.stride, spans, tokens, factors, p * Isa::kLanes,
                    c + p * Isa::kLanes, first);
      }
      if (last)
        fold_f32({.c = c,
                  .rows = args.m - w.row0 - i < kRows ? args.m - w.row0 - i : kRows,
                  .columns = w.panel.blocks * kBlockRows,
                  .out = w.out + (w.row0 + i) * args.ld,
                  .ld = args.ld});
    }
  }
};

template <Layout kL>
void many_spans(const MultiplyArgs& args) noexcept {
  const Packing& p = *args.packing;
  const bool direct = kL.code == Code::kI8 && p.record_k == p.k_pad;
  many<ProductSpans<kL>, false, Fold::kSpans, NoChunks>(
      args, kExactK, direct,
      [&](const uint8_t* block, int k0, int k1, uint8_t* panel, float*) {
        widen_exact<kL>(p, block, k0, k1, panel);
      },
      [](const uint8_t*, float*) {});
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
