// Many rows: the packed weights of two row blocks by one K block are widened into a panel in scratch (or
// taken as they lie, when the packed codes are a panel already) and multiplied with all rows. One tile loop
// per product.
//
// Order: group of `panel_blocks` row blocks > chunk of rows > K block > pair of row blocks > tile of rows.
// The panel of a pair stays in L1 while the rows' A block streams from L2, where it stays for all pairs of
// the group. Sums wait in C between K blocks; a rounded panel has scales of its own, so its sums are added to
// the output at once. The packed codes are read in order and once, which the hardware fetches ahead;
// prefetches of our own cost 10 % here.
#pragma once
#include "kernels/panel.inl.h"
#include "kernels/plan.h"

namespace KT_ISA_NAMESPACE {
namespace {

// A tile of the generic loop: kG token groups x kNP parts, operands as Isa::dot takes them. Parts run on
// through neighbouring blocks of the panel, `block_stride` bytes apart.
template <bool kSmall, int kG, int kNP>
KT_INLINE void dot_tile_s8(const int8_t* a, int64_t a_stride, const uint8_t* b, int64_t block_stride, int k,
                           int32_t* c, int64_t ldc, bool first) {
  typename Isa::Acc acc[kNP][kG];
  unroll<kNP * kG>([&](auto at) __attribute__((always_inline)) { acc[at / kG][at % kG] = Isa::zero_acc(); });
  for (int s = 0; s < k; s += Isa::kStep) {
    typename Isa::Bytes w[kNP];
    unroll<kNP>([&](auto i) __attribute__((always_inline)) {
      w[i] = Isa::load_bytes(b + i / kParts * block_stride + s * kBlockRows + i % kParts * kPartBytes);
    });
    unroll<kG>([&](auto g) __attribute__((always_inline)) {
      const auto x = Isa::load_act(a + g * a_stride + s * Isa::kActRows);
      unroll<kNP>([&](auto i)
                      __attribute__((always_inline)) { Isa::template dot<kSmall>(acc[i][g], w[i], x); });
    });
  }
  unroll<kNP>([&](auto i) __attribute__((always_inline)) {
    unroll<kG * Isa::kTokens>([&](auto j) __attribute__((always_inline)) {
      int32_t* to = c + j * ldc + i * Isa::kLanes;
      auto sum = Isa::template total<j % Isa::kTokens>(acc[i][j / Isa::kTokens]);
      if (!first) sum = Isa::add(sum, Isa::load(to));
      Isa::store(to, sum);
    });
  });
}

template <int kG, int kNP>
KT_INLINE void dot_tile_bf16(const uint8_t* a, int64_t a_stride, const uint8_t* b, int64_t block_stride,
                             int k, float* c, int64_t ldc, bool first) {
  using I = typename Late<Isa, kG>::type;
  typename I::AccF acc[kNP][kG];
  unroll<kNP * kG>([&](auto at) __attribute__((always_inline)) { acc[at / kG][at % kG] = I::zero_accf(); });
  for (int s = 0; s < 2 * k; s += Isa::kStep) {
    typename Isa::Bytes w[kNP];
    unroll<kNP>([&](auto i) __attribute__((always_inline)) {
      w[i] = Isa::load_bytes(b + i / kParts * block_stride + s * kBlockRows + i % kParts * kPartBytes);
    });
    unroll<kG>([&](auto g) __attribute__((always_inline)) {
      const auto x = Isa::load_act(reinterpret_cast<const int8_t*>(a) + g * a_stride + s * Isa::kActRows);
      unroll<kNP>([&](auto i) __attribute__((always_inline)) { I::dot_bf16(acc[i][g], w[i], x); });
    });
  }
  unroll<kNP>([&](auto i) __attribute__((always_inline)) {
    unroll<kG * Isa::kTokens>([&](auto j) __attribute__((always_inline)) {
      float* to = c + j * ldc + i * Isa::kLanes;
      auto sum = I::template total<j % Isa::kTokens>(acc[i][j / Isa::kTokens]);
      if (!first) sum = Isa::add(sum, Isa::load(to));
      Isa::store(to, sum);
    });
  });
}

template <int kM, int kNP>
KT_INLINE void fma_tile_f32(const float* a, int64_t a_stride, const float* b, int64_t block_stride, int k,
                            float* c, int64_t ldc, bool first) {
  typename Isa::F32 acc[kNP][kM];
  unroll<kNP * kM>([&](auto at) __attribute__((always_inline)) {
    acc[at / kM][at % kM] = first ? Isa::set1(0.0f) : Isa::load(c + at % kM * ldc + at / kM * Isa::kLanes);
  });
  for (int s = 0; s < k; ++s) {
    typename Isa::F32 w[kNP];
    unroll<kNP>([&](auto i) __attribute__((always_inline)) {
      w[i] = Isa::load(b + i / kParts * block_stride + s * kBlockRows + i % kParts * Isa::kLanes);
    });
    unroll<kM>([&](auto j) __attribute__((always_inline)) {
      const auto x = Isa::set1(a[j * a_stride + s]);
      unroll<kNP>([&](auto i) __attribute__((always_inline)) { acc[i][j] = Isa::fma(w[i], x, acc[i][j]); });
    });
  }
  unroll<kNP * kM>([&](auto at) __attribute__((always_inline)) {
    Isa::store(c + at % kM * ldc + at / kM * Isa::kLanes, acc[at / kM][at % kM]);
  });
}

// The three products. `pair` multiplies `rows` rows (a multiple of tile_rows) by `blocks` (1 or 2) row
// blocks. a: first row of packed activations, at the K block's first column; c: [rows, ldc].
struct ProductS8 {
  using A = int8_t;
  using C = int32_t;
  static constexpr int kCodeBytes = 1;
  template <bool kSmall>
  static KT_INLINE void pair(const std::byte* a, int k_pad, int rows, const uint8_t* b, int64_t block_stride,
                             int blocks, int k, C* c, int64_t ldc, bool first, Ahead& ahead) {
    if constexpr (Late<Isa, kSmall>::type::kTileUnit) {
      Late<Isa, kSmall>::type::tiles_s8(reinterpret_cast<const A*>(a), k_pad, rows, b, block_stride, blocks,
                                        k, c, ldc, first, ahead);
    } else {
      constexpr int kG = Isa::kTileGroups, kNP = Isa::kTileParts;
      for (int i = 0; i < rows; i += kG * Isa::kTokens)
        for (int p = 0; p < blocks * kParts; p += kNP) {
          const A* from = reinterpret_cast<const A*>(a) + static_cast<int64_t>(i) * k_pad;
          const uint8_t* w = b + p / kParts * block_stride + p % kParts * kPartBytes;
          C* to = c + i * ldc + p * Isa::kLanes;
          if (kNP > kParts && blocks == 1)
            dot_tile_s8 < kSmall, kG,
                kNP<kParts ? kNP : kParts>(from, int64_t{k_pad} * Isa::kActRows, w, block_stride, k, to, ldc,
                                           first);
          else
            dot_tile_s8<kSmall, kG, kNP>(from, int64_t{k_pad} * Isa::kActRows, w, block_stride, k, to, ldc,
                                         first);
        }
    }
  }
};

struct ProductBf16 {
  using C = float;
  static constexpr int kCodeBytes = 2;
  template <bool kAny>
  static KT_INLINE void pair(const std::byte* a, int k_pad, int rows, const uint8_t* b, int64_t block_stride,
                             int blocks, int k, C* c, int64_t ldc, bool first, Ahead& ahead) {
    if constexpr (Late<Isa, kAny>::type::kTileUnit) {
      Late<Isa, kAny>::type::tiles_bf16(reinterpret_cast<const uint8_t*>(a), k_pad, rows, b, block_stride,
                                        blocks, k, c, ldc, first, ahead);
    } else {
      constexpr int kG = Isa::kTileGroups, kNP = Isa::kTileParts;
      for (int i = 0; i < rows; i += kG * Isa::kTokens)
        for (int p = 0; p < blocks * kParts; p += kNP) {
          const auto* from = reinterpret_cast<const uint8_t*>(a) + static_cast<int64_t>(i) * k_pad * 2;
          const uint8_t* w = b + p / kParts * block_stride + p % kParts * kPartBytes;
          C* to = c + i * ldc + p * Isa::kLanes;
          if (kNP > kParts && blocks == 1)
            dot_tile_bf16 < kG, kNP<kParts ? kNP : kParts>(from, int64_t{k_pad} * 2 * Isa::kActRows, w,
                                                           block_stride, k, to, ldc, first);
          else
            dot_tile_bf16<kG, kNP>(from, int64_t{k_pad} * 2 * Isa::kActRows, w, block_stride, k, to, ldc,
                                   first);
        }
    }
  }
};

struct ProductF32 {
  using C = float;
  static constexpr int kCodeBytes = 4;
  template <bool>
  static KT_INLINE void pair(const std::byte* a, int k_pad, int rows, const uint8_t* b, int64_t block_stride,
                             int blocks, int k, C* c, int64_t ldc, bool first, Ahead&) {
    constexpr int kM = 4, kNP = kParts < 2 ? kParts : 2;
    for (int i = 0; i < rows; i += kM)
      for (int p = 0; p < blocks * kParts; p += kNP)
        fma_tile_f32<kM, kNP>(
            reinterpret_cast<const float*>(a) + static_cast<int64_t>(i) * k_pad, k_pad,
            reinterpret_cast<const float*>(b + p / kParts * block_stride) + p % kParts * Isa::kLanes,
            block_stride / 4, k, c + i * ldc + p * Isa::kLanes, ldc, first);
  }
};

// The order of packed activations here: a tile unit takes whole tiles of 16 rows x 64 bytes, which then lie
// in one piece (rows a power of two apart would fall into the same few sets of L1).
inline constexpr int kManySide = Isa::kTileUnit ? 16 : Isa::kActRows;
inline constexpr int kManyStepBytes = Isa::kTileUnit ? 64 : Isa::kStep;
template <class Product>
constexpr int act_side() {
  return Product::kCodeBytes == 4 ? 1 : kManySide;
}

inline constexpr int kPairRows = 2 * kBlockRows;                          // output columns of a pair
inline constexpr int kRowsAtOnce = Isa::kTileUnit ? 32 : Isa::kTileRows;  // token rows of one tile loop

enum class Fold : uint8_t { kExact, kRounded, kFloat };

// One pair of row blocks by the columns [k0, k1).
struct PairWork {
  const uint8_t* panel;
  int64_t block_stride;
  int blocks;  // 1 or 2
  int k0, k1;
  int row0, rows;
  const float* scales;  // [32]: of the rows, or of the rounded panel
  std::byte* sums;      // C: [rows, 32]; kRounded: one tile
  float* out;           // of row 0
  // what is read next, to be fetched meanwhile: next_bytes of each of two row blocks next_stride apart; or
  // null
  const uint8_t* next = nullptr;
  int64_t next_bytes = 0, next_stride = 0;
};

// out = (C - bias * sum) * (wscale * ascale), or added to out, for `rows` token rows from `row`
KT_INLINE void fold_s8(const MultiplyArgs& args, const PairWork& w, int row, int rows, const int32_t* c,
                       int bias, bool add) {
  const ActShape& s = args.acts.shape;
  const int64_t scale_at = w.k0 / s.scale_span, sum_at = w.k0 / s.sum_span;
  for (int i = row; i < row + rows && i < args.m; ++i, c += kPairRows) {
    const auto a = Isa::set1(args.acts.scales[i * static_cast<int64_t>(s.scale_spans()) + scale_at]);
    const auto shift = Isa::set1(
        static_cast<int32_t>(bias * args.acts.sums[i * static_cast<int64_t>(s.sum_spans()) + sum_at]));
    float* to = w.out + i * args.ld;
    for (int j = 0; j < w.blocks * kBlockRows; j += Isa::kLanes) {
      const auto x = Isa::to_f32(Isa::sub(Isa::load(c + j), shift));
      const auto scale = Isa::mul(Isa::load(w.scales + j), a);
      // not mul: few starts from +0 as well, and 0 * -scale must not become -0 here alone
      Isa::store(to + j, Isa::fma(x, scale, add ? Isa::load(to + j) : Isa::set1(0.0f)));
    }
  }
}

template <class Product, bool kSmall, Fold kFold>
__attribute__((noinline)) void multiply_pair(const MultiplyArgs& args, const PairWork& w) {
  using C = typename Product::C;
  const int k_pad = args.packing->k_pad;
  const bool first = kFold == Fold::kRounded || w.k0 == 0, last = w.k1 == k_pad;
  Ahead ahead;
  if (w.next) {
    ahead = {.at = w.next,
             .end = w.next + w.next_bytes,
             .second = w.next_stride - w.next_bytes,
             .bytes = w.next_bytes};
    const int64_t steps = (w.rows + kRowsAtOnce - 1) / kRowsAtOnce *
                          (static_cast<int64_t>(w.k1 - w.k0) * Product::kCodeBytes / 64);
    ahead.lines = static_cast<int>((2 * w.next_bytes / 64 + steps - 1) / steps);
  }
  for (int i = 0; i < w.rows; i += kRowsAtOnce) {
    const int some = w.rows - i < kRowsAtOnce ? w.rows - i : kRowsAtOnce;
    C* c = reinterpret_cast<C*>(w.sums) + (kFold == Fold::kRounded ? 0 : static_cast<int64_t>(i) * kPairRows);
    const std::byte* a = args.acts.codes + (static_cast<int64_t>(w.row0 + i) * k_pad +
                                            static_cast<int64_t>(w.k0) * act_side<Product>()) *
                                               Product::kCodeBytes;
    Product::template pair<kSmall>(a, k_pad, some, w.panel, w.block_stride, w.blocks, w.k1 - w.k0, c,
                                   kPairRows, first, ahead);
    if constexpr (kFold == Fold::kRounded) {
      fold_s8(args, w, w.row0 + i, some, c, Isa::kUnsigned ? 128 : 0, w.k0 > 0);
    } else if constexpr (kFold == Fold::kExact) {
      if (last) {
        PairWork whole = w;
        whole.k0 = 0;
        fold_s8(args, whole, w.row0 + i, some, c, args.packing->bias, false);
      }
    } else if (last) {
      for (int r = 0; r < some && w.row0 + i + r < args.m; ++r)
        for (int j = 0; j < w.blocks * kBlockRows; j += Isa::kLanes)
          Isa::store(w.out + (w.row0 + i + r) * args.ld + j, Isa::load(c + r * kPairRows + j));
    }
  }
}

// The walk. widen(block, k0, k1, i, panel, scales) fills the panel of block i of a pair; row_scales(block, i,
// scales) gives the scales that hold for whole rows.
template <Layout kL, class Product, bool kSmall, Fold kFold, class Widen, class RowScales>
KT_INLINE void many(const MultiplyArgs& args, int k_block, bool direct, Widen&& widen,
                    RowScales&& row_scales) {
  const Packing& p = *args.packing;
  constexpr int kNB = Isa::kPanelBlocks;
  const auto* blocks = reinterpret_cast<const uint8_t*>(args.blocks);
  const auto block_bytes = static_cast<int64_t>(p.block_bytes);
  auto* panel = reinterpret_cast<uint8_t*>(args.scratch);
  auto* scales = reinterpret_cast<float*>(panel + kPairPanelBytes);
  auto* sums = reinterpret_cast<std::byte*>(scales + kPairRows);
  if constexpr (Isa::kTileUnit) Late<Isa, Product::kCodeBytes>::type::begin_tiles();
  // Bytes of a row block before column k, roughly: what is fetched ahead need not be exact.
  const auto piece = [&](int k) { return block_bytes * (k < p.k_pad ? k : p.k_pad) / p.k_pad / 64 * 64; };
  for (int b0 = 0; b0 < args.count; b0 += kNB) {
    const int nb = args.count - b0 < kNB ? args.count - b0 : kNB;
    for (int row0 = 0; row0 < args.m; row0 += kManyRows) {
      const int left = args.acts.shape.rows - row0, rows = left < kManyRows ? left : kManyRows;
      for (int k0 = 0; k0 < p.k_pad; k0 += k_block) {
        const int k1 = p.k_pad - k0 < k_block ? p.k_pad : k0 + k_block;
        for (int b = 0; b < nb; b += 2) {
          const uint8_t* at = blocks + (b0 + b) * block_bytes;
          PairWork w{.panel = panel,
                     .block_stride = static_cast<int64_t>(k1 - k0) * kBlockRows * Product::kCodeBytes,
                     .blocks = nb - b < 2 ? 1 : 2,
                     .k0 = k0,
                     .k1 = k1,
                     .row0 = row0,
                     .rows = rows,
                     .scales = scales,
                     .sums = kFold == Fold::kRounded
                                 ? sums
                                 : sums + static_cast<int64_t>(b / 2) * rows * kPairRows * 4,
                     .out = args.out + (b0 + b) * kBlockRows};
          if (direct) {
            w.panel = at + p.header_bytes + static_cast<int64_t>(k0) * kBlockRows * Product::kCodeBytes;
            w.block_stride = block_bytes;
          }
          for (int i = 0; i < w.blocks; ++i) {
            if (!direct)
              widen(at + i * block_bytes, k0, k1, panel + i * w.block_stride, scales + i * kBlockRows);
            if (k1 == p.k_pad) row_scales(at + i * block_bytes, scales + i * kBlockRows);
          }
          if constexpr (Isa::kTileUnit) {
            // The piece of weights after this one, unless this pass over the rows is not the one that reads
            // it.
            int next_k = k0, next_b = b0 + b + 2;
            if (b + 2 >= nb) {
              next_b = k1 == p.k_pad ? b0 + kNB : b0;
              next_k = k1 == p.k_pad ? 0 : k1;
            }
            const bool again = row0 + kManyRows < args.m && k1 == p.k_pad && b + 2 >= nb;
            w.next_bytes = piece(next_k + k_block) - piece(next_k);
            w.next_stride = block_bytes;
            if (!again && (row0 == 0 || next_k == 0))
              w.next = next_b < args.count ? blocks + next_b * block_bytes + piece(next_k)
                                           : reinterpret_cast<const uint8_t*>(args.after);
          }
          multiply_pair<Product, kSmall, kFold>(args, w);
        }
      }
    }
  }
  if constexpr (Isa::kTileUnit) Late<Isa, Product::kCodeBytes>::type::end_tiles();
}

template <Layout kL>
void many_s8(const MultiplyArgs& args) noexcept {
  const Packing& p = *args.packing;
  if (kL.span == SpanLength::kLong && kL.min == Min::kNone && p.span == p.k_pad) {
    many<kL, ProductS8, small_codes(kL.code), Fold::kExact>(
        args, kExactK, kL.code == Code::kI8,
        [&](const uint8_t* block, int k0, int k1, uint8_t* panel, float*) {
          widen_exact<kL>(p, block, k0, k1, panel);
        },
        [&](const uint8_t* block, float* scales) {
          const SpanFactors<kL> f(block, 1);
          for (int i = 0; i < kParts; ++i) Isa::store(scales + i * Isa::kLanes, f.scale(0, i * Isa::kLanes));
        });
    return;
  }
  many<kL, ProductS8, false, Fold::kRounded>(
      args, kPanelK, false,
      [&](const uint8_t* block, int k0, int k1, uint8_t* panel, float* scales) {
        for (int i = 0; i < kParts; ++i)
          widen_rounded<kL>(p, block, k0, k1, i, panel, scales + i * Isa::kLanes);
      },
      [](const uint8_t*, float*) {});
}

template <Layout kL>
void many_bf16(const MultiplyArgs& args) noexcept {
  if constexpr (Isa::kBf16Product)
    many<kL, ProductBf16, false, Fold::kFloat>(
        args, kFloatK, kL.code == Code::kBf16,
        [&](const uint8_t* block, int k0, int k1, uint8_t* panel, float*) {
          widen_bf16<kL>(*args.packing, block, k0, k1, panel);
        },
        [](const uint8_t*, float*) {});
}

template <Layout kL>
void many_f32(const MultiplyArgs& args) noexcept {
  many<kL, ProductF32, false, Fold::kFloat>(
      args, kFloatK, false,
      [&](const uint8_t* block, int k0, int k1, uint8_t* panel, float*) {
        widen_f32<kL>(*args.packing, block, k0, k1, reinterpret_cast<float*>(panel));
      },
      [](const uint8_t*, float*) {});
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
