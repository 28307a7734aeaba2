// The products of many rows with a panel of weights: s8, bf16 and f32, one tile loop each.
#pragma once
#include "kernels/few.inl.h"

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
    // a single row is as fast as its weights come
    if constexpr (kM == 1 && Isa::kPrefetch > 0)
      Isa::prefetch(reinterpret_cast<const uint8_t*>(b + s * kBlockRows) + Isa::kPrefetch);
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

// The three products. `panel` multiplies `rows` rows (f32: any number, else a multiple of tile_rows) by `blocks` (1 to
// kPanelWidth) row blocks. a: first row of packed activations, at the K block's first column; c: [rows, ldc]. A tile
// unit calls beside(step, product) between its products.
struct ProductS8 {
  using A = int8_t;
  using C = int32_t;
  static constexpr int kCodeBytes = 1;
  template <bool kSmall, class Beside>
  static KT_INLINE void panel(const std::byte* a, int k_pad, int rows, const Panel& b, int k, C* c,
                              int64_t ldc, bool first, Beside&& beside) {
    if constexpr (Late<Isa, kSmall>::type::kTileUnit) {
      Late<Isa, kSmall>::type::tiles_s8(reinterpret_cast<const A*>(a), k_pad, rows, b, k, c, ldc, first,
                                        beside);
    } else {
      constexpr int kG = Isa::kTileGroups, kNP = Isa::kTileParts;
      for (int i = 0; i < rows; i += kG * Isa::kTokens)
        for (int p = 0; p < b.blocks * kParts; p += kNP) {
          const A* from = reinterpret_cast<const A*>(a) + static_cast<int64_t>(i) * k_pad;
          const uint8_t* w = b.at + p / kParts * b.stride + p % kParts * kPartBytes;
          C* to = c + i * ldc + p * Isa::kLanes;
          if (kNP > kParts && b.blocks == 1)
            dot_tile_s8 < kSmall, kG,
                kNP<kParts ? kNP : kParts>(from, int64_t{k_pad} * Isa::kActRows, w, b.stride, k, to, ldc,
                                           first);
          else
            dot_tile_s8<kSmall, kG, kNP>(from, int64_t{k_pad} * Isa::kActRows, w, b.stride, k, to, ldc,
                                         first);
        }
    }
  }
};

struct ProductBf16 {
  using C = float;
  static constexpr int kCodeBytes = 2;
  template <bool kAny, class Beside>
  static KT_INLINE void panel(const std::byte* a, int k_pad, int rows, const Panel& b, int k, C* c,
                              int64_t ldc, bool first, Beside&& beside) {
    if constexpr (Late<Isa, kAny>::type::kTileUnit) {
      Late<Isa, kAny>::type::tiles_bf16(reinterpret_cast<const uint8_t*>(a), k_pad, rows, b, k, c, ldc, first,
                                        beside);
    } else {
      constexpr int kG = Isa::kTileGroups, kNP = Isa::kTileParts;
      for (int i = 0; i < rows; i += kG * Isa::kTokens)
        for (int p = 0; p < b.blocks * kParts; p += kNP) {
          const auto* from = reinterpret_cast<const uint8_t*>(a) + static_cast<int64_t>(i) * k_pad * 2;
          const uint8_t* w = b.at + p / kParts * b.stride + p % kParts * kPartBytes;
          C* to = c + i * ldc + p * Isa::kLanes;
          if (kNP > kParts && b.blocks == 1)
            dot_tile_bf16 < kG, kNP<kParts ? kNP : kParts>(from, int64_t{k_pad} * 2 * Isa::kActRows, w,
                                                           b.stride, k, to, ldc, first);
          else
            dot_tile_bf16<kG, kNP>(from, int64_t{k_pad} * 2 * Isa::kActRows, w, b.stride, k, to, ldc, first);
        }
    }
  }
};

// Any number of rows: each is a chain of FMAs over K, so a few of them take as many tiles as there are, side by side.
struct ProductF32 {
  using C = float;
  static constexpr int kCodeBytes = 4;
  static constexpr bool kManyRegisters = Isa::kLanes != 8;  // AVX2 has 16 registers, the others 32
  template <bool, class Beside>
  static KT_INLINE void panel(const std::byte* a, int k_pad, int rows, const Panel& b, int k, C* c,
                              int64_t ldc, bool first, Beside&&) {
    const int parts = b.blocks * kParts;
    const auto tile = [&](auto m, auto np, int row, int p) __attribute__((always_inline)) {
      fma_tile_f32<decltype(m)::value, decltype(np)::value>(
          reinterpret_cast<const float*>(a) + static_cast<int64_t>(row) * k_pad, k_pad,
          reinterpret_cast<const float*>(b.at + p / kParts * b.stride) + p % kParts * Isa::kLanes,
          b.stride / 4, k, c + row * ldc + p * Isa::kLanes, ldc, first);
    };
    const auto across = [&](auto m, auto np, int row) __attribute__((always_inline)) {
      int p = 0;
      for (; p + np <= parts; p += np) tile(m, np, row, p);
      for (; p < parts; ++p) tile(m, Int<1>{}, row, p);
    };
    int row = 0;
    for (; row + 8 <= rows && kManyRegisters; row += 8) across(Int<8>{}, Int<2>{}, row);
    for (; row + 4 <= rows; row += 4) across(Int<4>{}, Int<2>{}, row);
    for (; row < rows; ++row) across(Int<1>{}, Int<4>{}, row);
  }
};

}  // namespace
}  // namespace KT_ISA_NAMESPACE
