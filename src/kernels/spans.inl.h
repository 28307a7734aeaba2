// Many rows, exactly: what `few` computes, to the bit, for any number of rows. Codes are widened into a panel as they
// are, and sums of whole numbers are scaled after every kActSpan columns by the activations' scale, and those sums by
// the weights' where a span of theirs ends. That takes two operations for the four products of 16 columns and four
// bytes a step; with panels rounded to one scale for 512 columns, which would save them, models with outlier channels
// lose 3 % of perplexity.
#pragma once
#include "kernels/many.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

template <Layout kL>
struct ProductSpans {
  static constexpr int kCodeBytes = 1;
  static constexpr bool kLong = kL.span == SpanLength::kLong;
  // Columns of a piece, all of one span of the weights, and steps of activations' scales in it.
  static constexpr int kPiece = kLong ? kChunk : span_columns(kL.span), kPieces = kExactK / kPiece;
  static constexpr int kFolds = kPiece / kActSpan, kScales = kExactK / kActSpan;
  static constexpr bool kMins = kL.min != Min::kNone;
  static constexpr bool kStarts = !kMins && starts_from_sums();
  // Half of what a tile of plain products takes: sums of whole numbers and their totals share the registers.
  static constexpr int kGroups = Isa::kTileGroups / 2, kRows = kGroups * Isa::kTokens;
  using F32 = typename Isa::F32;

  // Of the pieces of a panel, for its rows.
  struct alignas(64) Factors {
    float scale[kPieces][kPanelRows];
    float min[kMins ? kPieces : 1][kPanelRows];
    bool ends[kPieces];  // of a span of the weights, which takes its min there
  };
  static_assert(kPanelRows * kExactK + sizeof(Factors) <= kPanelBytes);

  static __attribute__((noinline)) void read(const Packing& p, const PanelWork& w, Factors& to) {
    for (int b = 0; b < w.panel.blocks; ++b) {
      int at = 0;
      for_chunks<kL>(p, w.block + b * static_cast<int64_t>(p.block_bytes), w.k0, w.k1,
                     [&](const auto& f, const uint8_t*, int k, int in_record) __attribute__((always_inline)) {
                       for (int s = 0; s < kChunk; s += kPiece, ++at) {
                         const int span = (in_record + s) / p.span, end = in_record + s + kPiece;
                         to.ends[at] = !kLong || end % p.span == 0 || k + kChunk == p.k_pad;
                         for (int i = 0; i < kParts; ++i) {
                           const int row = i * Isa::kLanes, column = b * kBlockRows + row;
                           Isa::store(to.scale[at] + column, f.scale(span, row));
                           if constexpr (kMins) Isa::store(to.min[at] + column, min_of<kL>(f, span, row));
                         }
                       }
                     });
    }
  }

  // Of kRows rows of activations: scales and sums by kActSpan columns, sums of values by pieces that end a span.
  struct Tokens {
    float scale[kRows][kScales];
    int32_t sum[kRows][kMins ? 1 : kScales];
    float value[kRows][kMins ? kPieces : 1];  // negative
  };
  static KT_INLINE void read(const MultiplyArgs& args, int row, const PanelWork& w, Tokens& to) {
    const ActShape& s = args.acts.shape;
    const int scales = (w.k1 - w.k0) / kActSpan, pieces = (w.k1 - w.k0) / kPiece;
    for (int j = 0; j < kRows; ++j) {
      const float* scale =
          args.acts.scales + static_cast<int64_t>(row + j) * s.scale_spans() + w.k0 / kActSpan;
      const int64_t sums = static_cast<int64_t>(row + j) * s.sum_spans();
      for (int i = 0; i < scales; ++i) to.scale[j][i] = scale[i];
      if constexpr (kMins)
        for (int i = 0; i < pieces; ++i)
          to.value[j][i] = -args.acts.values[sums + (w.k0 + i * kPiece) / s.sum_span];
      else
        for (int i = 0; i < scales; ++i) to.sum[j][i] = args.acts.sums[sums + w.k0 / kActSpan + i];
    }
  }

  // c [kRows, kNP parts] (+)= one tile over `pieces` pieces; the order of operations is that of FewInteger.
  template <int kNP>
  struct Tile {
    F32 total[kNP][kRows], part[kNP][kRows];
    template <class F>
    static KT_INLINE void each(F&& f) {
      unroll<kNP * kRows>([&](auto at)
                              __attribute__((always_inline)) { f(Int<at / kRows>{}, Int<at % kRows>{}); });
    }
    // part += kActSpan columns from column k of the panel on
    KT_INLINE void fold(const int8_t* a, int64_t a_stride, const uint8_t* b, int64_t block_stride, int k,
                        const Tokens& tokens) {
      const int s = k / kActSpan;
      typename Isa::Acc acc[kNP][kGroups];
      unroll<kNP * kGroups>([&](auto at) __attribute__((always_inline)) {
        if constexpr (kStarts)
          acc[at / kGroups][at % kGroups] = Isa::set1(tokens.sum[at % kGroups][s]);
        else
          acc[at / kGroups][at % kGroups] = Isa::zero_acc();
      });
      unroll<kActSpan / Isa::kStep>([&](auto t) __attribute__((always_inline)) {
        typename Isa::Bytes w[kNP];
        const int column = k + t * Isa::kStep;
        unroll<kNP>([&](auto i) __attribute__((always_inline)) {
          w[i] =
              Isa::load_bytes(b + i / kParts * block_stride + column * kBlockRows + i % kParts * kPartBytes);
        });
        unroll<kGroups>([&](auto g) __attribute__((always_inline)) {
          const auto x = Isa::load_act(a + g * a_stride + column * Isa::kActRows);
          unroll<kNP>([&](auto i) __attribute__((always_inline)) {
            Isa::template dot<small_codes(kL.code)>(acc[i][g], w[i], x);
          });
        });
      });
      each([&](auto i, auto j) __attribute__((always_inline)) {
        auto dot = Isa::template total<j % Isa::kTokens>(acc[i][j / Isa::kTokens]);
        if constexpr (!kMins && !kStarts) dot = Isa::add(dot, Isa::set1(tokens.sum[j][s]));
        part[i][j] = Isa::fma(Isa::to_f32(dot), Isa::set1(tokens.scale[j][s]), part[i][j]);
      });
    }
    KT_INLINE void finish(const Factors& factors, int piece, int column) {
      unroll<kNP>([&](auto i) __attribute__((always_inline)) {
        const F32 scale = Isa::load(factors.scale[piece] + column + i * Isa::kLanes);
        unroll<kRows>([&](auto j) __attribute__((always_inline)) {
          total[i][j] = Isa::fma(part[i][j], scale, total[i][j]);
          part[i][j] = Isa::set1(0.0f);
        });
      });
    }
    KT_INLINE void take_mins(const Factors& factors, const Tokens& tokens, int piece, int column) {
      if constexpr (kMins)
        unroll<kNP>([&](auto i) __attribute__((always_inline)) {
          const F32 min = Isa::load(factors.min[piece] + column + i * Isa::kLanes);
          unroll<kRows>([&](auto j) __attribute__((always_inline)) {
            total[i][j] = Isa::fma(min, Isa::set1(tokens.value[j][piece]), total[i][j]);
          });
        });
    }
  };
  template <int kNP>
  static KT_INLINE void tile(const int8_t* a, int64_t a_stride, const uint8_t* b, int64_t block_stride,
                             int pieces, const Tokens& tokens, const Factors& factors, int column, float* c,
                             bool first) {
    Tile<kNP> t;
    t.each([&](auto i, auto j) __attribute__((always_inline)) {
      t.total[i][j] = first ? Isa::set1(0.0f) : Isa::load(c + j * kPanelRows + i * Isa::kLanes);
      t.part[i][j] = Isa::set1(0.0f);
    });
    for (int piece = 0; piece < pieces; ++piece) {
      for (int k = piece * kPiece; k < (piece + 1) * kPiece; k += kActSpan)
        t.fold(a, a_stride, b, block_stride, k, tokens);
      const bool ends = factors.ends[piece];
      if (!kLong || ends || piece + 1 == pieces) t.finish(factors, piece, column);
      if (kMins && ends) t.take_mins(factors, tokens, piece, column);
    }
    t.each([&](auto i, auto j) __attribute__((always_inline)) {
      Isa::store(c + j * kPanelRows + i * Isa::kLanes, t.total[i][j]);
    });
  }

  static __attribute__((noinline)) void multiply(const MultiplyArgs& args, const PanelWork& w) {
    constexpr int kNP = Isa::kTileParts;
    const int k_pad = args.packing->k_pad, pieces = (w.k1 - w.k0) / kPiece;
    const bool first = w.k0 == 0, last = w.k1 == k_pad;
    auto& factors = *reinterpret_cast<Factors*>(args.scratch + kPanelRows * kExactK);
    read(*args.packing, w, factors);
    for (int i = 0; i < w.rows; i += kRows) {
      Tokens tokens;
      read(args, w.row0 + i, w, tokens);
      float* c =
          reinterpret_cast<float*>(w.sums) + (first && last ? 0 : static_cast<int64_t>(i) * kPanelRows);
      const auto* a = reinterpret_cast<const int8_t*>(args.acts.codes) +
                      static_cast<int64_t>(w.row0 + i) * k_pad + static_cast<int64_t>(w.k0) * Isa::kActRows;
      const int64_t a_stride = int64_t{k_pad} * Isa::kActRows;
      for (int p = 0; p < w.panel.blocks * kParts; p += kNP) {
        const uint8_t* b = w.panel.at + p / kParts * w.panel.stride + p % kParts * kPartBytes;
        if (kNP > kParts && w.panel.blocks == 1)
          tile < kNP<kParts ? kNP : kParts>(a, a_stride, b, w.panel.stride, pieces, tokens, factors,
                                            p * Isa::kLanes, c + p * Isa::kLanes, first);
        else
          tile<kNP>(a, a_stride, b, w.panel.stride, pieces, tokens, factors, p * Isa::kLanes,
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
      [&](const uint8_t* block, int k0, int k1, uint8_t* panel, float*, const Fine&) {
        widen_exact<kL>(p, block, k0, k1, panel);
      },
      [](const uint8_t*, float*) {});
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
