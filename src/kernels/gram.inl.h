// X^T X by squares of 32 columns (gram.h).
//
// Both operands are the same packed panel: a step of 16 columns is a step of weights as it lies, and the
// columns of one row of H are the activations, which a vector ISA broadcasts from the same bytes. A tile unit
// wants them transposed, 16 columns x 16 words: that is done strip by strip, into 32 KiB that stay in L1 for
// all squares of the strip, while the other operand streams past L1 from L2 (the loads say so: without, it
// drives the strip out and halves the speed). Sums wait in L2 between panels, and are fetched ahead.
//
// Bound by operations: per strip and panel, 32 KiB are transposed (about 1,600 cycles) for 1,024 cycles a
// square. Error: f32 sums over the rows, one more rounding into H.
#pragma once
#include "kernels/gram.h"
#include "kernels/isa/strip.h"
#include "kernels/rows.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

inline constexpr int kGramCode = Isa::kBf16Product ? 2 : 4;
inline constexpr int64_t kGramBlockBytes = int64_t{kGramRows} * kBlockRows * kGramCode;
inline constexpr int64_t kGramStripStride = 2 * kGramBlockBytes;          // of the panel
inline constexpr int kGramStep = Isa::kBf16Product ? Isa::kStep / 2 : 1;  // rows of X in a step
static_assert(kGramSide == 2 * kBlockRows);

// Zero while all numbers seen were finite and would stay so in bf16: x * 0 is not a number otherwise.
struct Finite {
  F32 sum = Isa::set1(0.0f);
  KT_INLINE void see(F32 x) { sum = Isa::fma(Isa::mul(x, Isa::set1(1 + 0x1p-8f)), Isa::set1(0.0f), sum); }
  KT_INLINE bool all() const { return Isa::sum_of(sum) == 0; }
};

// One step of 16 columns: rows[0 .. kGramStep), times their factors.
template <Real kType>
KT_INLINE void pack_step(const uint8_t* const* rows, const float* factors, int column, int columns,
                         uint8_t* to, Finite& finite) {
  F32 x[kGramStep][kParts];
  for (int j = 0; j < kGramStep; ++j) {
    const Unit u = column + kUnit <= columns ? load_unit<kType>(rows[j], column)
                                             : load_last_unit<kType>(rows[j], column, columns);
    const F32 factor = Isa::set1(factors[j]);
    for (int i = 0; i < kParts; ++i) {
      x[j][i] = Isa::mul(u.v[i], factor);
      finite.see(x[j][i]);
    }
  }
  for (int i = 0; i < kParts; ++i) {
    if constexpr (Isa::kBf16Product) {
      F32 numbers[kGramStep];
      for (int j = 0; j < kGramStep; ++j) numbers[j] = x[j][i];
      Late<Isa, kType>::type::store_bf16_step(to + i * kPartBytes, numbers);
    } else {
      Isa::store(reinterpret_cast<float*>(to) + i * Isa::kLanes, Isa::round_bf16(x[0][i]));
    }
  }
}

// 32 columns of a group at a time: a line of each row is read once. Rows that are missing are the first one
// times zero.
template <Real kType>
__attribute__((noinline)) bool pack_group(const GramPackArgs& args, uint8_t* panel) {
  constexpr int kStepBytes = kBlockRows * kGramStep * kGramCode;
  constexpr int kSize = kType == Real::kF32 ? 4 : 2;
  const uint8_t* rows[kGramGroup];
  float factors[kGramGroup];
  for (int t = 0; t < kGramGroup; ++t) {
    const bool real = t < args.count;
    rows[t] = static_cast<const uint8_t*>(args.rows[real ? t : 0]);
    factors[t] = real ? (args.factors ? args.factors[t] : 1.0f) : 0.0f;
  }
  Finite finite;
  for (int column = 0; column < args.columns; column += kGramSide, panel += kGramStripStride)
    for (int t = 0; t < kGramGroup; t += kGramStep) {
      for (int j = 0; j < kGramStep; ++j) __builtin_prefetch(rows[t + j] + column * kSize + 256, 0, 2);
      uint8_t* to = panel + t / kGramStep * kStepBytes;
      pack_step<kType>(rows + t, factors + t, column, args.columns, to, finite);
      pack_step<kType>(rows + t, factors + t, column + kUnit, args.columns, to + kGramBlockBytes, finite);
    }
  return finite.all();
}

// The same for whole groups of bf16 as it is, where two rows can be put side by side without widening them.
template <class I>
__attribute__((noinline)) bool pack_pairs(const GramPackArgs& args, uint8_t* panel) {
  constexpr int kStepBytes = kBlockRows * 4;
  alignas(4) constexpr int8_t kZeros[4] = {};
  const auto zero = I::load_act(kZeros);
  auto sum = I::zero_accf();  // of numbers times zero: as Finite
  const auto* rows = reinterpret_cast<const uint8_t* const*>(args.rows);
  for (int column = 0; column < args.columns; column += kUnit, panel += kGramBlockBytes)
    for (int t = 0; t < kGramGroup; t += 2) {
      const uint8_t *a = rows[t] + column * 2, *b = rows[t + 1] + column * 2;
      __builtin_prefetch(a + 256, 0, 2);
      __builtin_prefetch(b + 256, 0, 2);
      const auto both = pair_rows<I>(a, b);
      I::dot_bf16(sum, both, zero);
      I::store_bytes(panel + t / 2 * kStepBytes, both);
    }
  return I::sum_of(I::template total<0>(sum)) == 0;
}

template <class I>
bool gram_pack(const GramPackArgs& args) noexcept {
  auto* panel = reinterpret_cast<uint8_t*>(args.panel) +
                static_cast<int64_t>(args.group) * kGramGroup * kBlockRows * kGramCode;
  if (args.type == Real::kF32) return pack_group<Real::kF32>(args, panel);
  if (args.type == Real::kF16) return pack_group<Real::kF16>(args, panel);
  if constexpr (kPairsRows)
    if (!args.factors && args.count == kGramGroup && args.columns % kGramSide == 0)
      return pack_pairs<I>(args, panel);
  return pack_group<Real::kBf16>(args, panel);
}

// What a tile unit reads ahead of: the sums of the next square into L1, the next strip and the columns' part
// of the next panel into L2.
struct GramAhead {
  const uint8_t* sums = nullptr;
  const uint8_t *strip = nullptr, *strip_end = nullptr;
  const uint8_t *part = nullptr, *part_end = nullptr;
  KT_INLINE void fetch() {
    for (int i = 0; i < 4; ++i, sums += 64) __builtin_prefetch(sums, 0, 3);
    if (strip < strip_end)
      for (int i = 0; i < 2; ++i, strip += 64) __builtin_prefetch(strip, 0, 2);
    if (part < part_end)
      for (int i = 0; i < 2; ++i, part += 64) __builtin_prefetch(part, 0, 2);
  }
};

// kG groups of rows of H by kNP parts of columns, from two blocks of a strip each; as dot_tile_bf16 of
// many.inl.h, but for where the activations lie: a step of K apart is a step of the block.
template <class I, int kG, int kNP>
KT_INLINE void gram_tile_bf16(const uint8_t* a, const uint8_t* b, int k, float* c, bool first) {
  typename I::AccF acc[kNP][kG];
  unroll<kNP * kG>([&](auto at) __attribute__((always_inline)) { acc[at / kG][at % kG] = I::zero_accf(); });
  for (int s = 0; s < 2 * k; s += I::kStep) {
    typename I::Bytes w[kNP];
    unroll<kNP>([&](auto i) __attribute__((always_inline)) {
      w[i] = I::load_bytes(b + i / kParts * kGramBlockBytes + s * kBlockRows + i % kParts * kPartBytes);
    });
    unroll<kG>([&](auto g) __attribute__((always_inline)) {
      const auto x =
          I::load_act(reinterpret_cast<const int8_t*>(a) + g * I::kActRows * I::kStep + s * kBlockRows);
      unroll<kNP>([&](auto i) __attribute__((always_inline)) { I::dot_bf16(acc[i][g], w[i], x); });
    });
  }
  unroll<kNP>([&](auto i) __attribute__((always_inline)) {
    unroll<kG * I::kTokens>([&](auto j) __attribute__((always_inline)) {
      float* to = c + j * kGramSide + i * I::kLanes;
      auto sum = I::template total<j % I::kTokens>(acc[i][j / I::kTokens]);
      if (!first) sum = I::add(sum, I::load(to));
      I::store(to, sum);
    });
  });
}

// Two fused multiply-adds a cycle, four cycles each: 8 sums at least; 16 where registers allow.
inline constexpr int kF32Rows = Isa::kLanes == 16 && Isa::kTileGroups == 8 ? 8 : 4;
inline constexpr int kF32Parts = Isa::kLanes == 16 && Isa::kTileGroups < 8 ? 1 : 2;

// The same in f32: kM rows, whose numbers are a_row floats apart and a_step for a step of K, by kNP parts of
// blocks of [k, 16]. c (+)= their product.
struct TileF32 {
  const float* a;
  int64_t a_row, a_step;
  const float* b;
  int64_t b_block;
  float* c;
  int64_t ldc;
};
template <int kM, int kNP>
KT_INLINE void gram_tile_f32(const TileF32& t, int k, bool first) {
  F32 acc[kNP][kM];
  unroll<kNP * kM>([&](auto at) __attribute__((always_inline)) {
    acc[at / kM][at % kM] =
        first ? Isa::set1(0.0f) : Isa::load(t.c + at % kM * t.ldc + at / kM * Isa::kLanes);
  });
  for (int s = 0; s < k; ++s) {
    F32 w[kNP];
    unroll<kNP>([&](auto i) __attribute__((always_inline)) {
      w[i] = Isa::load(t.b + i / kParts * t.b_block + s * kBlockRows + i % kParts * Isa::kLanes);
    });
    unroll<kM>([&](auto j) __attribute__((always_inline)) {
      const auto x = Isa::set1(t.a[j * t.a_row + s * t.a_step]);
      unroll<kNP>([&](auto i) __attribute__((always_inline)) { acc[i][j] = Isa::fma(w[i], x, acc[i][j]); });
    });
  }
  unroll<kNP * kM>([&](auto at) __attribute__((always_inline)) {
    Isa::store(t.c + at % kM * t.ldc + at / kM * Isa::kLanes, acc[at / kM][at % kM]);
  });
}

// sums [32, 32] (+)= a^T b over k rows of X, for vectors: a and b are strips of a panel.
template <class I>
KT_INLINE void gram_square(const uint8_t* a, const uint8_t* b, int k, float* sums, bool first) {
  constexpr int kRows = I::kBf16Product ? I::kTileGroups * I::kTokens : kF32Rows;
  constexpr int kNP = I::kBf16Product ? I::kTileParts : kF32Parts;
  constexpr int kRowBytes = I::kBf16Product ? I::kStep : 4;
  for (int i = 0; i < kGramSide; i += kRows)
    for (int p = 0; p < 2 * kParts; p += kNP) {
      const uint8_t* from = a + i / kBlockRows * kGramBlockBytes + i % kBlockRows * kRowBytes;
      const uint8_t* w = b + p / kParts * kGramBlockBytes + p % kParts * I::kLanes * kRowBytes;
      float* to = sums + i * kGramSide + p * I::kLanes;
      if constexpr (I::kBf16Product)
        gram_tile_bf16<I, I::kTileGroups, kNP>(from, w, k, to, first);
      else
        gram_tile_f32<kRows, kNP>({.a = reinterpret_cast<const float*>(from),
                                   .a_row = 1,
                                   .a_step = kBlockRows,
                                   .b = reinterpret_cast<const float*>(w),
                                   .b_block = kGramBlockBytes / 4,
                                   .c = to,
                                   .ldc = kGramSide},
                                  k, first);
    }
}

// The same for a tile unit: `a` transposed, which L1 holds; b goes past it. Two by two tiles, as tiled.h has
// it.
template <class I>
KT_INLINE void tile_square(const uint8_t* a, const uint8_t* b, int k, float* sums, bool first,
                           GramAhead& ahead) {
  constexpr int kTileBytes = 64, kAll = 16 * kTileBytes;
  decltype(unit_of(I())) unit;
  const auto each = [&](auto&& f) __attribute__((always_inline)) {
    unroll<4>([&](auto t) __attribute__((always_inline)) {
      f(t, sums + t / 2 * kBlockRows * kGramSide + t % 2 * kBlockRows);
    });
  };
  each([&](auto t, float* c) __attribute__((always_inline)) {
    if (first)
      unit.template zero<t>();
    else
      unit.template load<t>(c, kGramSide * 4);
  });
  for (int s = 0; s < k / 32; ++s, a += kAll, b += kAll) {
    ahead.fetch();
    load_past<6>(unit, b, kTileBytes);
    load_past<7>(unit, b + kGramBlockBytes, kTileBytes);
    unit.template load<4>(a, kTileBytes);
    unit.template dot_bf16<0, 4, 6>();
    unit.template dot_bf16<1, 4, 7>();
    unit.template load<5>(a + kGramBlockBytes, kTileBytes);
    unit.template dot_bf16<2, 5, 6>();
    unit.template dot_bf16<3, 5, 7>();
  }
  each([&](auto t, float* c) __attribute__((always_inline)) { unit.template store<t>(c, kGramSide * 4); });
}

// One strip of rows of H by the strips of columns up to `columns`.
template <class I>
KT_INLINE void gram_strip(const GramArgs& args, const uint8_t* a, const uint8_t* b, int columns, int k,
                          float* sums, bool first, GramAhead& ahead) {
  constexpr int kSquare = kGramSide * kGramSide;
  if constexpr (I::kTileUnit) {
    auto* strip = reinterpret_cast<uint8_t*>(args.strip);
    for (int block = 0; block < 2; ++block)
      for (int s = 0; s < k / 32; ++s)
        transpose_words(a + block * kGramBlockBytes + s * 1024, strip + block * kGramBlockBytes + s * 1024);
    for (int j = 0; j < columns; ++j) {
      ahead.sums = reinterpret_cast<const uint8_t*>(sums + (j + 1) * kSquare);
      tile_square<I>(strip, b + j * kGramStripStride, k, sums + j * kSquare, first, ahead);
    }
  } else {
    for (int j = 0; j < columns; ++j)
      gram_square<I>(a, b + j * kGramStripStride, k, sums + j * kSquare, first);
  }
}

// Sums of one strip of rows into H.
KT_INLINE void gram_fold(const GramArgs& args, int strip, const float* sums) {
  for (int r = 0; r < kGramSide; ++r) {
    const int row = strip * kGramSide + r;
    if (row >= args.columns) return;
    float* to = args.out + row * args.ld;
    for (int j = 0; j < args.column_strips; ++j) {
      const int column = (args.column0 + j) * kGramSide, count = row + 1 - column;
      if (count <= 0) break;
      const float* from = sums + (j * kGramSide + r) * kGramSide;
      if (count >= kGramSide)
        for (int c = 0; c < kGramSide; c += Isa::kLanes)
          Isa::store(to + column + c, Isa::add(Isa::load(to + column + c), Isa::load(from + c)));
      else
        for (int c = 0; c < count; ++c) to[column + c] += from[c];
    }
  }
}

template <class I>
void gram_add(const GramArgs& args) noexcept {
  const int strips = (args.columns + kGramSide - 1) / kGramSide;
  const int64_t panel_bytes = strips * kGramStripStride, row_sums = int64_t{args.column_strips} * 1024;
  const auto* panel = reinterpret_cast<const uint8_t*>(args.panels);
  if constexpr (I::kTileUnit) I::begin_tiles();
  for (int row = 0; row < args.rows; row += kGramRows, panel += panel_bytes) {
    const int left = args.rows - row < kGramRows ? args.rows - row : kGramRows;
    const int k = (left + kGramGroup - 1) / kGramGroup * kGramGroup;
    const uint8_t* b = panel + args.column0 * kGramStripStride;
    GramAhead ahead;
    if (row + kGramRows < args.rows) {
      ahead.part = b + panel_bytes;
      ahead.part_end = ahead.part + args.column_strips * kGramStripStride;
    }
    for (int i = 0; i < args.row_strips; ++i) {
      const int on_diagonal = args.row0 + i - args.column0 + 1;
      const int columns = on_diagonal < args.column_strips ? on_diagonal : args.column_strips;
      if (columns <= 0) continue;
      const uint8_t* a = panel + (args.row0 + i) * kGramStripStride;
      ahead.strip = a + kGramStripStride;
      ahead.strip_end = ahead.strip + (i + 1 < args.row_strips ? kGramStripStride : 0);
      gram_strip<I>(args, a, b, columns, k, args.sums + i * row_sums, args.fresh && row == 0, ahead);
    }
  }
  if constexpr (I::kTileUnit) I::end_tiles();
  if (!args.fold) return;
  for (int i = 0; i < args.row_strips; ++i) gram_fold(args, args.row0 + i, args.sums + i * row_sums);
}

// out[i, 16 * j + r] = sum over c of a[i, c] * b[j, c, r], by panels of K that leave room in L1.
void product_f32(const ProductF32Args& args) noexcept {
  constexpr int kColumns = kF32Parts > kParts ? 2 : 1;  // blocks of a tile
  const auto tiles = [&]<int kM, int kNP>(TileF32 t, int parts, int k,
                                          bool first) __attribute__((always_inline)) {
    for (int p = 0; p < parts; p += kNP, t.b += kNP * Isa::kLanes, t.c += kNP * Isa::kLanes)
      gram_tile_f32<kM, kNP>(t, k, first);
  };
  for (int k0 = 0; k0 < args.k; k0 += kProductK) {
    const int k = args.k - k0 < kProductK ? args.k - k0 : kProductK;
    for (int j = 0; j < args.blocks; j += kColumns) {
      const bool whole = args.blocks - j >= kColumns;
      for (int i = 0; i < args.m;) {
        const TileF32 t{.a = args.a + i * args.a_stride + k0,
                        .a_row = args.a_stride,
                        .a_step = 1,
                        .b = args.b + j * args.b_stride + int64_t{k0} * kBlockRows,
                        .b_block = args.b_stride,
                        .c = args.out + i * args.out_stride + j * kBlockRows,
                        .ldc = args.out_stride};
        constexpr int kOne = kF32Parts < kParts ? kF32Parts : kParts;
        const bool full = args.m - i >= kF32Rows;
        if (full && whole)
          tiles.template operator()<kF32Rows, kF32Parts>(t, kColumns * kParts, k, k0 == 0);
        else if (full)
          tiles.template operator()<kF32Rows, kOne>(t, kParts, k, k0 == 0);
        else
          for (int block = 0; block < (whole ? kColumns : 1); ++block) {
            TileF32 one = t;
            one.b += block * t.b_block;
            one.c += block * kBlockRows;
            tiles.template operator()<1, kOne>(one, kParts, k, k0 == 0);
          }
        i += full ? kF32Rows : 1;
      }
    }
  }
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
