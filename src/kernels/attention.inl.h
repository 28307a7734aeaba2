// Attention of query rows over a group of blocks of keys and values (attention.h): scores of all rows, then weights,
// then values.
//
// Scores: keys lie across lanes, so a row's sums need no adding across. Output: columns lie across lanes, likewise. A
// sum of products runs over 32 numbers of K at a time (16 with kF32), one partial sum for the even ones and one for the
// odd; the partial sums are joined and added to the total. That is what a tile unit does with bf16, whose products are
// exact in f32, as are those of bf16 and s8: every route gives the same bits, denormals aside. FMA bound when the
// blocks are in L2; few rows are bound by reading the cache. Error: f32 sums of d and of kGroupKeys terms; kBf16 also
// rounds p, at most 2^-8 of each, kS8 p times a scale.
#pragma once
#include "kernels/attention_blocks.inl.h"
#include "kernels/attention_weights.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

inline constexpr int kQueryRows = 4;

// total[r][lane] += sum over `words` words of x[r][number] * (numbers of the words at w, w + w_stride, ...), for kV
// vectors side by side. x: rows x_stride apart, even numbers first, odd ones `plane` behind; kF32: plain.
template <From kFrom, int kRows, int kV, class Fetch>
KT_INLINE void add_products(const float* x, int64_t x_stride, int64_t plane, const uint8_t* w,
                            int64_t w_stride, int words, F32 (&total)[kRows][kV], Fetch& ahead) {
  constexpr int kPack = pack_of(kFrom), kSums = kPack > 1 ? 2 : 1, kWordsAtOnce = 16 * kSums / kPack;
  for (int first = 0; first < words; first += kWordsAtOnce) {
    const int last = first + kWordsAtOnce < words ? first + kWordsAtOnce : words;
    ahead.fetch();
    F32 part[kRows][kV][kSums];
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      unroll<kV>([&](auto v) __attribute__((always_inline)) {
        unroll<kSums>([&](auto j) __attribute__((always_inline)) { part[r][v][j] = Isa::set1(0.0f); });
      });
    });
    for (int s = first; s < last; ++s) {
      F32 numbers[kV][kPack];
      unroll<kV>([&](auto v) __attribute__((always_inline)) {
        load_numbers<kFrom>(w + s * w_stride + v * Isa::kLanes * 4, numbers[v]);
      });
      unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        unroll<kPack>([&](auto j) __attribute__((always_inline)) {
          const int64_t at = kSums == 1 ? s : j % 2 * plane + s * (kPack / 2) + j / 2;
          const F32 a = Isa::set1(x[r * x_stride + at]);
          unroll<kV>([&](auto v) __attribute__((always_inline)) {
            part[r][v][j % kSums] = Isa::fma(a, numbers[v][j], part[r][v][j % kSums]);
          });
        });
      });
    }
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      unroll<kV>([&](auto v) __attribute__((always_inline)) {
        F32 joined = part[r][v][0];
        if constexpr (kSums == 2) joined = Isa::add(joined, part[r][v][1]);
        total[r][v] = Isa::add(total[r][v], joined);
      });
    });
  }
}

template <int kRows>
KT_INLINE void clear(F32 (&total)[kRows][kVectors]) {
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    unroll<kVectors>([&](auto v) __attribute__((always_inline)) { total[r][v] = Isa::set1(0.0f); });
  });
}

// Scores of rows [row, row + kRows) for kWide keys, the first of which is `key`.
template <From kFrom, int kRows, class Fetch>
KT_INLINE void score_pass(const AttendArgs& args, const Memory& memory, int row, int key, const uint8_t* w,
                          int64_t w_stride, Fetch& ahead) {
  F32 total[kRows][kVectors];
  clear(total);
  add_products<kFrom>(args.q + int64_t{row} * args.d, args.d, args.d / 2, w, w_stride,
                      args.d / pack_of(kFrom), total, ahead);
  float* scores = memory.scores(row) + key;
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
      Isa::store(scores + r * kScoreFloats + v * Isa::kLanes, total[r][v]);
    });
  });
}

// Calls pass(Int<rows of it>, first row) until all rows are done.
template <int kAtOnce, class Pass>
KT_INLINE void for_rows(int rows, Pass&& pass) {
  int row = 0;
  if constexpr (kAtOnce > 1)
    for (; row + kAtOnce <= rows; row += kAtOnce) pass(Int<kAtOnce>{}, row);
  for (; row < rows; ++row) pass(Int<1>{}, row);
}

// Whether several passes over rows are worth a copy of what they take as plain numbers.
constexpr bool widens(From from, int rows) {
  return from != From::kF32 && (rows > kQueryRows || (rows > 1 && (from == From::kS8 || rows < kQueryRows)));
}

// Scores of a block, which lies at `block` as kFrom says, for all rows.
template <From kFrom, class Fetch>
KT_INLINE void score_block(const AttendArgs& args, const Memory& memory, int first_key, const uint8_t* block,
                           Fetch& ahead) {
  constexpr int64_t kStride = kKvBlock * 4;
  constexpr int kAtOnce = kFrom == From::kS8 ? 1 : kQueryRows;
  const int keys = args.keys - first_key < kKvBlock ? args.keys - first_key : kKvBlock;
  for (int key = 0; key < keys; key += kWide) {
    const uint8_t* w = block + key * 4;
    if (widens(kFrom, args.rows)) {
      widen<kFrom>(w, kStride, args.d / pack_of(kFrom), memory.wide_floats());
      for_rows<kQueryRows>(args.rows, [&](auto rows, int row) __attribute__((always_inline)) {
        score_pass<From::kPlain, rows.value>(args, memory, row, first_key + key, memory.wide, kWideStride,
                                             ahead);
      });
    } else {
      for_rows<kAtOnce>(args.rows, [&](auto rows, int row) __attribute__((always_inline)) {
        score_pass<kFrom, rows.value>(args, memory, row, first_key + key, w, kStride, ahead);
      });
    }
  }
}

// Sums of rows [row, row + kRows) over all keys for kWide columns from `column`, as `products(total)` adds them.
template <int kRows, class Products>
KT_INLINE void value_pass(const AttendArgs& args, const Memory& memory, int row, int column,
                          Products&& products) {
  F32 total[kRows][kVectors];
  clear(total);
  products(total);
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
      put_out(args, memory, row + r, column + v * Isa::kLanes, total[r][v]);
    });
  });
}

template <From kFrom, class Fetch>
KT_INLINE void add_values(const AttendArgs& args, const Memory& memory, Fetch& ahead) {
  constexpr int kPack = pack_of(kFrom);
  constexpr int kAtOnce = kFrom == From::kS8 ? 1 : kQueryRows;
  const int64_t stride = int64_t{args.v_width} * 4;
  const auto words = [&](int b, int pack) __attribute__((always_inline)) {
    const int keys = args.keys - b * kKvBlock < kKvBlock ? args.keys - b * kKvBlock : kKvBlock;
    return (keys + pack - 1) / pack;
  };
  const int blocks = blocks_of(args);
  for (int c = 0; c < args.dv; c += kWide) {
    const auto at = [&](int b) __attribute__((always_inline)) { return block_at(args.v, b) + c * 4; };
    if (widens(kFrom, args.rows)) {
      int numbers = 0;
      for (int b = 0; b < blocks; ++b) {
        widen<kFrom>(at(b), stride, words(b, kPack), memory.wide_floats() + b * kKvBlock * kWide);
        numbers = b * kKvBlock + words(b, kPack) * kPack;
      }
      for_rows<kQueryRows>(args.rows, [&](auto rows, int row) __attribute__((always_inline)) {
        value_pass<rows.value>(args, memory, row, c, [&](auto& total) __attribute__((always_inline)) {
          add_products<From::kPlain>(memory.weights(row), kScoreFloats, kScoresAt, memory.wide, kWideStride,
                                     numbers / 2, total, ahead);
        });
      });
    } else {
      for_rows<kAtOnce>(args.rows, [&](auto rows, int row) __attribute__((always_inline)) {
        value_pass<rows.value>(args, memory, row, c, [&](auto& total) __attribute__((always_inline)) {
          for (int b = 0; b < blocks; ++b) {
            const float* p = kFrom == From::kF32 ? memory.scores(row) + b * kKvBlock
                                                 : memory.weights(row) + b * kKvBlock / 2;
            add_products<kFrom>(p, kScoreFloats, kScoresAt, at(b), stride, words(b, kPack), total, ahead);
          }
        });
      });
    }
  }
}

template <KvType kType>
__attribute__((noinline)) void attend_rows(const AttendArgs& args) {
  constexpr From kFrom = from_of(kType);
  constexpr From kShared = kFrom == From::kS8 ? From::kBf16 : kFrom;  // what keys made of values are
  const Memory memory(args);
  const int64_t passes = args.rows / kQueryRows + args.rows % kQueryRows, steps = (args.d + 31) / 32;
  Stretches ahead = stretches_of_group(args, passes * ((args.keys + kWide - 1) / kWide) * steps);
  for (int b = 0; b < blocks_of(args); ++b) {
    if (args.k)
      score_block<kFrom>(args, memory, b * kKvBlock, block_at(args.k, b), ahead);
    else
      score_block<kShared>(args, memory, b * kKvBlock, shared_keys<kType>(args, memory, b), ahead);
  }
  Stretches next = next_stretches(args, args.rows + passes * (args.dv / kWide) * ((args.keys + 31) / 32));
  soften<kType, kType == KvType::kF32 ? Weights::kInPlace : Weights::kPlanes>(args, memory, next);
  add_values<kFrom>(args, memory, next);
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE

#include "kernels/attention_tiles.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

// A template, so that tiles are only looked at where there are some.
template <class Any, KvType kType>
KT_INLINE void attend_bf16(const AttendArgs& args) {
  if constexpr (Any::kTileUnit)
    if (args.rows >= kNarrowRows) return attend_tiles<Any, kType>(args);
  attend_rows<kType>(args);
}

}  // namespace

void attend(const AttendArgs& args) noexcept {
  if (args.type == KvType::kF32) {
    attend_rows<KvType::kF32>(args);
  } else if (args.type == KvType::kBf16) {
    attend_bf16<Isa, KvType::kBf16>(args);
  } else {
    attend_bf16<Isa, KvType::kS8>(args);
  }
}

void query(KvType type, const float* from, int columns, float scale, int d, float* q, void* q_bf16) noexcept {
  constexpr float kLog2e = 1.44269504f;
  scale *= kLog2e;
  if (type == KvType::kF32) {
    for (int i = 0; i < columns; ++i) q[i] = from[i] * scale;
    for (int i = columns; i < d; ++i) q[i] = 0;
    return;
  }
  constexpr int kL = Isa::kLanes;
  auto* words = static_cast<int32_t*>(q_bf16);
  for (int i = 0; i < d; i += 2 * kL) {
    alignas(64) float two[2 * kL];
    const float* at = from + i;
    if (i + 2 * kL > columns) {  // the last ones
      for (int j = 0; j < 2 * kL; ++j) two[j] = i + j < columns ? from[i + j] : 0.0f;
      at = two;
    }
    const I32 both = Isa::words_bf16(Isa::mul(Isa::load(at), Isa::set1(scale)),
                                     Isa::mul(Isa::load(at + kL), Isa::set1(scale)));
    Isa::store(words + i / 2, both);
    if (!q) continue;
    Isa::store(q + i / 2, Isa::low_bf16(both));
    Isa::store(q + d / 2 + i / 2, Isa::high_bf16(both));
  }
}

void merge(int rows, float* top, float* sum, float* next_top, float* next_sum) noexcept {
  for (int r = 0; r < rows; r += Isa::kLanes) merge_rows(top + r, sum + r, next_top + r, next_sum + r);
}

// Part after part, whole rows: those were written by other cores, and stretches of lines are fetched ahead.
void join(const JoinArgs& args) noexcept {
  const int64_t stride = AttendSums::floats(args.rows, args.dv);
  for (int r = args.row; r < args.end; ++r) {
    float* out = AttendSums::in(args.parts, args.rows).out + int64_t{r} * args.dv;
    for (int i = 1; i < args.count; ++i) {
      const AttendSums next = AttendSums::in(args.parts + i * stride, args.rows);
      const float* x = next.out + int64_t{r} * args.dv;
      const F32 mine = Isa::set1(next.top[r]), its = Isa::set1(next.sum[r]);
      for (int c = 0; c < args.dv; c += Isa::kLanes)
        Isa::store(out + c, Isa::fma(Isa::load(x + c), its, Isa::mul(Isa::load(out + c), mine)));
    }
  }
}

}  // namespace KT_ISA_NAMESPACE
