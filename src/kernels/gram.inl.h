// X^T X by squares of 32 columns (gram.h).
//
// Both operands are the same packed panel: a step of 16 columns is a step of weights as it lies, and the
// columns of one row of H are the activations, which a vector ISA broadcasts from the same bytes. A tile unit
// wants them transposed, 16 columns x 16 words: that is done strip by strip, into 32 KiB that stay in L1 for
// all squares of the strip, while the other operand streams past L1 from L2 (the loads say so: without, it
// drives the strip out and a fifth of the speed is gone). Sums wait in L2 between panels, and are fetched
// ahead; a square's are stored between the first products of the next one, for the tile unit waits 200 cycles
// if they are stored at once.
//
// On a tile unit a square takes 1,024 cycles a panel, and its operands and sums 0.6 lines of L2 a cycle,
// nearly all that L2 gives; what comes from L3 (X, panels, H) takes its time beside that. So the lines of the
// next strip are asked for a few at a time between products, and the strip before is added to H there. That
// much is free; to transpose the next strip, or to pack the next panel, between products makes them wait for
// longer than either takes by itself. Error: f32 sums over the rows, one more rounding into H.
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

// 32 columns of a group at a time: a line of each row is read once, and asked for two turns before, for 32
// rows side by side are more than the CPU foresees. Rows that are missing are the first one times zero.
template <Real kType>
__attribute__((noinline)) bool pack_group(const GramPackArgs& args, uint8_t* panel) {
  constexpr int kStepBytes = kBlockRows * kGramStep * kGramCode;
  constexpr int kTurnBytes = kGramSide * (kType == Real::kF32 ? 4 : 2);
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
      for (int j = 0; j < kGramStep; ++j)
        for (int line = 0; line < kTurnBytes; line += 64)
          __builtin_prefetch(rows[t + j] + (column / kGramSide + 2) * kTurnBytes + line, 0, 3);
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

// Squares on a tile unit, two by two tiles as tiled.h has it: `a` transposed, which L1 holds; b goes past it.
template <class I>
struct TileSquares {
  decltype(unit_of(I())) unit;
  float* pending = nullptr;  // where the sums in the tiles belong

  static KT_INLINE float* tile(float* sums, int t) {
    return sums + t / 2 * kBlockRows * kGramSide + t % 2 * kBlockRows;
  }
  KT_INLINE void operands(const uint8_t* a, const uint8_t* b) {
    constexpr int kTileBytes = 64;
    load_past<6>(unit, b, kTileBytes);
    load_past<7>(unit, b + kGramBlockBytes, kTileBytes);
    unit.template load<4>(a, kTileBytes);
    unit.template load<5>(a + kGramBlockBytes, kTileBytes);
  }
  // sums [32, 32] (+)= a^T b, in time for the next call or finish(); on the diagonal without the tile above
  // it. The next 32 x 32 sums in memory are the next call's. beside(s) is called once for every step s, for
  // what the vector units can do meanwhile.
  template <bool kDiagonal, class Beside>
  KT_INLINE void run(const uint8_t* a, const uint8_t* b, int k, float* sums, bool first, Beside&& beside) {
    constexpr int kAll = 1024, kLines = 5;  // of 64, in 15 steps
    const auto* ahead = reinterpret_cast<const uint8_t*>(sums + kGramSide * kGramSide);
    operands(a, b);
    unroll<4>([&](auto t) __attribute__((always_inline)) {
      if (pending) unit.template store<t>(tile(pending, t), kGramSide * 4);
      if (kDiagonal && t == 1) return;
      if (first)
        unit.template zero<t>();
      else
        unit.template load<t>(tile(sums, t), kGramSide * 4);
      unit.template dot_bf16<t, 4 + t / 2, 6 + t % 2>();
    });
    pending = sums;
    beside(0);
    for (int s = 1; s < k / 32; ++s) {
      for (int i = 0; i < kLines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 3);
      operands(a + s * kAll, b + s * kAll);
      unit.template dot_bf16<0, 4, 6>();
      if constexpr (!kDiagonal) unit.template dot_bf16<1, 4, 7>();
      beside(s);
      unit.template dot_bf16<2, 5, 6>();
      unit.template dot_bf16<3, 5, 7>();
    }
  }
  KT_INLINE void finish() {
    if (!pending) return;
    unroll<4>([&](auto t) __attribute__((always_inline)) {
      unit.template store<t>(tile(pending, t), kGramSide * 4);
    });
  }
};

// Strips of rows of H, for one panel after the other, by the strips of columns up to the diagonal.
struct GramStrip {
  int i = 0;  // of args.row_strips
  int columns = 0;
  bool to_diagonal = false;  // the last of the columns
  int k = 0;
  const uint8_t *a = nullptr, *b = nullptr;  // the strip; the first of the columns
  bool first = false, last = false;          // of the panels: sums start from zero; they are complete
};
KT_INLINE int strips_of(const GramArgs& args) {
  return (args.rows + kGramRows - 1) / kGramRows * args.row_strips;
}
KT_INLINE GramStrip strip_at(const GramArgs& args, int n) {
  const int strips = (args.columns + kGramSide - 1) / kGramSide, at = n / args.row_strips;
  const int i = n % args.row_strips, on_diagonal = args.row0 + i - args.column0 + 1;
  const int left = args.rows - at * kGramRows, rows = left < kGramRows ? left : kGramRows;
  const auto* panel = reinterpret_cast<const uint8_t*>(args.panels) + at * strips * kGramStripStride;
  return {.i = i,
          .columns = on_diagonal < args.column_strips ? on_diagonal : args.column_strips,
          .to_diagonal = on_diagonal <= args.column_strips,
          .k = (rows + kGramGroup - 1) / kGramGroup * kGramGroup,
          .a = panel + (args.row0 + i) * kGramStripStride,
          .b = panel + args.column0 * kGramStripStride,
          .first = args.fresh && at == 0,
          .last = left <= kGramRows};
}

// Sums of one square of a strip of rows into H: all of it that lies in H and not above the diagonal.
struct GramFold {
  const float* sums;
  float* out;  // of its first row and column
  int64_t ld;
  KT_INLINE void row(int r) const {
    float* to = out + r * ld;
    for (int c = 0; c < kGramSide; c += Isa::kLanes)
      Isa::store(to + c, Isa::add(Isa::load(to + c), Isa::load(sums + r * kGramSide + c)));
  }
  KT_INLINE void fetch(int first, int rows) const {
    for (int r = first; r < first + rows; ++r)
      for (int c = 0; c < kGramSide; c += 16) __builtin_prefetch(out + r * ld + c, 0, 2);
  }
  KT_INLINE void part(int rows, bool diagonal) const {
    for (int r = 0; r < rows; ++r)
      if (!diagonal)
        row(r);
      else
        for (int c = 0; c <= r; ++c) out[r * ld + c] += sums[r * kGramSide + c];
  }
};
KT_INLINE GramFold fold_of(const GramArgs& args, int i, int j) {
  return {.sums = args.sums + (int64_t{i} * args.column_strips + j) * kGramSide * kGramSide,
          .out = args.out + int64_t{args.row0 + i} * kGramSide * args.ld + (args.column0 + j) * kGramSide,
          .ld = args.ld};
}
KT_INLINE void fold_square(const GramArgs& args, const GramStrip& at, int j) {
  const int left = args.columns - (args.row0 + at.i) * kGramSide;
  fold_of(args, at.i, j).part(left < kGramSide ? left : kGramSide, at.to_diagonal && j == at.columns - 1);
}
KT_INLINE void fold_strip(const GramArgs& args, const GramStrip& at) {
  for (int j = 0; j < at.columns; ++j) fold_square(args, at, j);
}

// A strip transposed, for L1 to hold.
KT_INLINE void turn_strip(const GramStrip& at, uint8_t* to) {
  for (int block = 0; block < 2; ++block)
    for (int s = 0; s < at.k / 32; ++s) {
      const int64_t tile = block * kGramBlockBytes + s * 1024;
      transpose_words(at.a + tile, to + tile);
    }
}

// The next strip on its way to L2, some lines at every step of this one's products.
struct FetchStrip {
  const uint8_t* at = nullptr;
  int64_t left = 0;  // lines
  int64_t each = 0;
  FetchStrip(const uint8_t* strip, int steps)
      : at(strip), left(kGramStripStride / 64), each((left + steps - 1) / steps) {}
  KT_INLINE void step() {
    for (int64_t i = 0; i < each && left > 0; ++i, --left, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// One strip by its columns. `before`: the strip before it, whose sums are added to H between the products.
// What of H this one needs is asked for likewise.
template <class I>
KT_INLINE void multiply_strip(const GramArgs& args, const GramStrip& at, const GramStrip* before,
                              FetchStrip fetch, TileSquares<I>& squares) {
  const auto* strip = reinterpret_cast<const uint8_t*>(args.strip);
  float* sums = args.sums + int64_t{at.i} * args.column_strips * kGramSide * kGramSide;
  const uint8_t* b = at.b;
  const bool fetch_h = args.fold && at.last;
  const int full = at.columns - (at.to_diagonal ? 1 : 0);
  const int folds = before && at.k == kGramRows ? before->columns - (before->to_diagonal ? 1 : 0) : 0;
  for (int j = 0; j < full; ++j, b += kGramStripStride, sums += kGramSide * kGramSide) {
    const GramFold fold = fold_of(args, j < folds ? before->i : 0, j), own = fold_of(args, at.i, j);
    squares.template run<false>(strip, b, at.k, sums, at.first, [&](int s) __attribute__((always_inline)) {
      fetch.step();
      if (fetch_h) own.fetch(2 * s, 2);
      if (j >= folds) return;
      fold.row(2 * s);
      fold.row(2 * s + 1);
    });
  }
  if (at.to_diagonal)
    squares.template run<true>(strip, b, at.k, sums, at.first,
                               [&](int) __attribute__((always_inline)) { fetch.step(); });
  if (before)
    for (int j = folds; j < before->columns; ++j) fold_square(args, *before, j);
}

template <class I>
KT_INLINE void gram_tiles(const GramArgs& args) {
  const int count = strips_of(args);
  I::begin_tiles();
  TileSquares<I> squares;
  GramStrip before;
  for (int n = 0; n < count; ++n) {
    const GramStrip at = strip_at(args, n), next = strip_at(args, n + 1 < count ? n + 1 : n);
    turn_strip(at, reinterpret_cast<uint8_t*>(args.strip));
    multiply_strip(args, at, args.fold && at.last && at.i > 0 ? &before : nullptr,
                   FetchStrip(next.a, at.columns * (at.k / 32)), squares);
    before = at;
  }
  squares.finish();
  I::end_tiles();
  if (args.fold) fold_strip(args, before);
}

template <class I>
void gram_add(const GramArgs& args) noexcept {
  if constexpr (I::kTileUnit) {
    gram_tiles<I>(args);
  } else {
    const int count = strips_of(args);
    for (int n = 0; n < count; ++n) {
      const GramStrip at = strip_at(args, n);
      float* sums = args.sums + int64_t{at.i} * args.column_strips * kGramSide * kGramSide;
      for (int j = 0; j < at.columns; ++j, sums += kGramSide * kGramSide)
        gram_square<I>(at.a, at.b + j * kGramStripStride, at.k, sums, at.first);
      if (args.fold && at.last) fold_strip(args, at);
    }
  }
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
