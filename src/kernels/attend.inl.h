// Attention of a few query rows over one block of keys (table.h, AttendArgs), in f32 whatever the cache
// stores.
//
// Scores: 4 rows x 2 keys of independent sums along d, so that every key is widened once for 4 rows. Output:
// 4 rows x 16 columns of sums along the keys, every value widened once for 4 rows. Both are FMA bound when
// the block is in L2; one row (decode without grouped heads) is bound by reading the cache. Error: f32 sums
// of d and `keys` terms.
#pragma once
#include "kernels/rows.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

inline constexpr int kQueryRows = 4, kKeysAtOnce = 2;

template <Real kType>
KT_INLINE F32 load_cached(const uint8_t* row, int column) {
  if constexpr (kType == Real::kF32)
    return Isa::load(reinterpret_cast<const float*>(row) + column);
  else if constexpr (kType == Real::kBf16)
    return Isa::load_bf16(row + 2 * column);
  else
    return Isa::load_f16(row + 2 * column);
}

template <Real kType, int kRows, int kKeys>
KT_INLINE void score_tile(const AttendArgs& args, int row, int key, int64_t score_stride) {
  constexpr int kSize = kType == Real::kF32 ? 4 : 2;
  const float* q = args.q + row * args.q_stride;
  const auto* k = static_cast<const uint8_t*>(args.k) + key * args.k_stride * kSize;
  F32 sums[kRows][kKeys];
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    unroll<kKeys>([&](auto j) __attribute__((always_inline)) { sums[r][j] = Isa::set1(0.0f); });
  });
  for (int c = 0; c < args.d; c += Isa::kLanes) {
    F32 keys[kKeys];
    unroll<kKeys>([&](auto j) __attribute__((always_inline)) {
      keys[j] = load_cached<kType>(k + j * args.k_stride * kSize, c);
    });
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      const F32 x = Isa::load(q + r * args.q_stride + c);
      unroll<kKeys>([&](auto j)
                        __attribute__((always_inline)) { sums[r][j] = Isa::fma(x, keys[j], sums[r][j]); });
    });
  }
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    unroll<kKeys>([&](auto j) __attribute__((always_inline)) {
      args.scores[(row + r) * score_stride + key + j] = Isa::sum_of(sums[r][j]);
    });
  });
}

template <Real kType, int kRows>
KT_INLINE void score_rows(const AttendArgs& args, int row, int64_t score_stride) {
  int key = 0;
  for (; key + kKeysAtOnce <= args.keys; key += kKeysAtOnce)
    score_tile<kType, kRows, kKeysAtOnce>(args, row, key, score_stride);
  for (; key < args.keys; ++key) score_tile<kType, kRows, 1>(args, row, key, score_stride);
}

// Turns a row of scores into weights e^(s - top), zeros where a key is not seen, and brings the row's sums up
// to date.
KT_INLINE void soften_row(const AttendArgs& args, int row, int64_t score_stride) {
  float* scores = args.scores + row * score_stride;
  const int begin = args.begin[row] > 0 ? args.begin[row] : 0,
            end = args.end[row] < args.keys ? args.end[row] : args.keys;
  constexpr float kUnseen = -3.0e38f;
  for (int j = 0; j < begin && j < args.keys; ++j) scores[j] = kUnseen;
  for (int64_t j = end > 0 ? end : 0; j < score_stride; ++j) scores[j] = kUnseen;
  if (begin >= end) {
    for (int64_t j = 0; j < score_stride; ++j) scores[j] = 0;
    return;
  }
  F32 most = Isa::set1(kUnseen);
  for (int64_t j = 0; j < score_stride; j += Isa::kLanes) most = Isa::max(most, Isa::load(scores + j));
  const float old = args.top[row], found = Isa::max_of(most), top = old > found ? old : found;
  F32 sum = Isa::set1(0.0f);
  for (int64_t j = 0; j < score_stride; j += Isa::kLanes) {
    const F32 s = Isa::load(scores + j);
    const F32 p = Isa::zero_below(exp(Isa::sub(s, Isa::set1(top))), s, Isa::set1(-2.0e38f));
    sum = Isa::add(sum, p);
    Isa::store(scores + j, p);
  }
  args.top[row] = top;
  if (old == top) {
    args.sum[row] += Isa::sum_of(sum);
    return;
  }
  alignas(64) float factor[Isa::kLanes];
  Isa::store(factor, Isa::zero_below(exp(Isa::set1(old - top)), Isa::set1(old), Isa::set1(-2.0e38f)));
  args.sum[row] = args.sum[row] * factor[0] + Isa::sum_of(sum);
  float* out = args.out + static_cast<int64_t>(row) * args.dv;
  const F32 shrink = Isa::set1(factor[0]);
  for (int c = 0; c < args.dv; c += Isa::kLanes) Isa::store(out + c, Isa::mul(Isa::load(out + c), shrink));
}

template <Real kType, int kRows>
KT_INLINE void add_values(const AttendArgs& args, int row, int64_t score_stride) {
  constexpr int kSize = kType == Real::kF32 ? 4 : 2;
  for (int c = 0; c < args.dv; c += kUnit) {
    F32 sums[kRows][kParts];
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      const float* out = args.out + static_cast<int64_t>(row + r) * args.dv + c;
      unroll<kParts>([&](auto i)
                         __attribute__((always_inline)) { sums[r][i] = Isa::load(out + i * Isa::kLanes); });
    });
    const auto* v = static_cast<const uint8_t*>(args.v);
    for (int key = 0; key < args.keys; ++key, v += args.v_stride * kSize) {
      F32 values[kParts];
      unroll<kParts>([&](auto i) __attribute__((always_inline)) {
        values[i] = load_cached<kType>(v, c + i * Isa::kLanes);
      });
      unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        const F32 p = Isa::set1(args.scores[(row + r) * score_stride + key]);
        unroll<kParts>(
            [&](auto i) __attribute__((always_inline)) { sums[r][i] = Isa::fma(p, values[i], sums[r][i]); });
      });
    }
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      float* out = args.out + static_cast<int64_t>(row + r) * args.dv + c;
      unroll<kParts>([&](auto i)
                         __attribute__((always_inline)) { Isa::store(out + i * Isa::kLanes, sums[r][i]); });
    });
  }
}

template <Real kType>
__attribute__((noinline)) void attend_rows(const AttendArgs& args) {
  const int64_t score_stride = (args.keys + kUnit - 1) / kUnit * kUnit;
  int row = 0;
  for (; row + kQueryRows <= args.rows; row += kQueryRows)
    score_rows<kType, kQueryRows>(args, row, score_stride);
  for (; row < args.rows; ++row) score_rows<kType, 1>(args, row, score_stride);
  for (row = 0; row < args.rows; ++row) soften_row(args, row, score_stride);
  for (row = 0; row + kQueryRows <= args.rows; row += kQueryRows)
    add_values<kType, kQueryRows>(args, row, score_stride);
  for (; row < args.rows; ++row) add_values<kType, 1>(args, row, score_stride);
}

void attend(const AttendArgs& args) noexcept {
  if (args.type == Real::kF32)
    attend_rows<Real::kF32>(args);
  else if (args.type == Real::kBf16)
    attend_rows<Real::kBf16>(args);
  else
    attend_rows<Real::kF16>(args);
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
