// Attention's scores turned into weights, and how what two stretches of keys gave is joined.
#pragma once
#include "kernels/attention_blocks.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

inline constexpr float kFarBelow =
    -100.0f;  // of a logarithm: what is less counts as 0, so no product is denormal
inline constexpr float kWhole =
    12583039.0f;  // 1.5 * 2^23 + 127: what is added to it is rounded to a whole number
inline constexpr float kMostWhole = 0x1p21f;  // of a top that kWhole may be moved by

// 2^f for |f| <= 1/2, relative error below 1e-7, f32's own; and below 3e-6, less than a five hundredth of what rounding
// to bf16 may add.
inline constexpr float kPrecise[] = {1.0f,           0.693147242f,   0.240226522f,   0.0555031039f,
                                     0.00961769279f, 0.00134066434f, 0.000155946778f};
inline constexpr float kForBf16[] = {0.999999285f, 0.693121791f, 0.240247443f, 0.0559178591f, 0.00957010221f};

// 2^(s - top), 0 where s < least; base is kWhole - top. t is the nearest whole number to s, minus top, above kWhole.
template <int kTerms>
KT_INLINE F32 power(const float (&c)[kTerms], F32 s, F32 base, F32 least) {
  const F32 t = Isa::add(s, base), f = Isa::sub(s, Isa::sub(t, base));
  F32 p = Isa::set1(c[kTerms - 1]);
  unroll<kTerms - 1>(
      [&](auto i) __attribute__((always_inline)) { p = Isa::fma(p, f, Isa::set1(c[kTerms - 2 - i])); });
  return Isa::zero_under(Isa::mul(p, Isa::exp2_above(t)), s, least);
}

// Where weights go. kInPlace: f32, where the scores were. kPlanes: numbers that bf16 holds, those of even keys, and
// kScoresAt behind them those of odd ones. kWords: bf16, in order.
enum class Weights { kInPlace, kPlanes, kWords };

template <Weights kWeights>
KT_INLINE void put_weights(float* at, int key, I32 words) {
  if constexpr (kWeights == Weights::kWords) {
    Isa::store(reinterpret_cast<int32_t*>(at + key / 2), words);
  } else {
    Isa::store(at + key / 2, Isa::low_bf16(words));
    Isa::store(at + kScoresAt + key / 2, Isa::high_bf16(words));
  }
}

// The scale of key j, with kS8; those of the block's keys after it stand behind it.
KT_INLINE const float* scales_at(const void* const* blocks, int width, int j) {
  return reinterpret_cast<const float*>(block_at(blocks, j / kKvBlock) + kKvBlock * width) + j % kKvBlock;
}

KT_INLINE float largest(const float* scores, int keys) {
  F32 most[2] = {Isa::load(scores), Isa::load(scores + Isa::kLanes)};
  for (int j = 2 * Isa::kLanes; j < keys; j += 2 * Isa::kLanes)
    unroll<2>([&](auto i) __attribute__((always_inline)) {
      most[i] = Isa::max(most[i], Isa::load(scores + j + i * Isa::kLanes));
    });
  return Isa::max_of(Isa::max(most[0], most[1]));
}

// The same of scores times the scales of their keys, which they become.
KT_INLINE float scale_largest(const AttendArgs& args, float* scores, int keys) {
  const void* const* blocks = args.k ? args.k : args.v;
  F32 most = Isa::set1(-__builtin_inff());
  for (int b = 0; b * kKvBlock < keys; ++b, scores += kKvBlock) {
    const float* scales = scales_at(blocks, args.d, b * kKvBlock);
    const int some = keys - b * kKvBlock < kKvBlock ? keys - b * kKvBlock : kKvBlock;
    for (int j = 0; j < some; j += Isa::kLanes) {
      const F32 s = Isa::mul(Isa::load(scores + j), Isa::load(scales + j));
      Isa::store(scores + j, s);
      most = Isa::max(most, s);
    }
  }
  return Isa::max_of(most);
}

// The largest score of keys [begin, end), out of `keys`; those of the others become -infinity. With kS8 they are
// scaled here.
template <KvType kType>
KT_INLINE float prepare_scores(const AttendArgs& args, float* scores, int begin, int end, int keys) {
  if constexpr (kType == KvType::kS8) {
    const float found = scale_largest(args, scores, keys);
    if (begin == 0 && end == keys) return found;
  }
  for (int j = 0; j < begin; ++j) scores[j] = -__builtin_inff();
  for (int j = end; j < keys; ++j) scores[j] = -__builtin_inff();
  return largest(scores, keys);
}

// The scales of the values, with kS8, for soften_row: none so small that it has no inverse.
KT_INLINE void take_scales(const AttendArgs& args, const Memory& memory) {
  alignas(64) float inverse[kGroupKeys];
  for (int j = 0; j < blocks_of(args) * kKvBlock; j += Isa::kLanes) {
    const F32 scale = Isa::max(Isa::load(scales_at(args.v, args.v_width, j)), Isa::set1(0x1p-100f));
    Isa::store(memory.scales + j, scale);
    Isa::store(inverse + j, Isa::div(Isa::set1(1.0f), scale));
  }
  for (int j = 0; j < blocks_of(args) * kKvBlock / 2; ++j) {
    memory.inverse[j] = inverse[2 * j];
    memory.inverse[kGroupKeys / 2 + j] = inverse[2 * j + 1];
  }
}

// Turns a row of scores into weights, zeros where a key is not seen; top and sum of the group go to `memory`.
template <KvType kType, Weights kWeights>
KT_INLINE void soften_row(const AttendArgs& args, const Memory& memory, int row) {
  constexpr int kL = Isa::kLanes;
  float *at = memory.weights(row), *scores = memory.scores(row);
  const int keys = (args.keys + 31) / 32 * 32;  // that products take
  const int begin = args.begin[row] > 0 ? args.begin[row] : 0,
            end = args.end[row] < args.keys ? args.end[row] : args.keys;
  if (begin >= end) {
    const F32 zero = Isa::set1(0.0f);
    if constexpr (kWeights == Weights::kInPlace)
      for (int j = 0; j < keys; j += kL) Isa::store(scores + j, zero);
    else
      for (int j = 0; j < keys; j += 2 * kL) put_weights<kWeights>(at, j, Isa::words_bf16(zero, zero));
    memory.top[row] = kt::kSawNothing;
    memory.sum[row] = 0;
    return;
  }
  const float top = __builtin_rintf(prepare_scores<kType>(args, scores, begin, end, keys));
  float moved = top;
  if (__builtin_fabsf(top) > kMostWhole) {  // too far for kWhole to be moved there
    for (int j = 0; j < keys; ++j) scores[j] -= top;
    moved = 0;
  }
  const F32 base = Isa::set1(kWhole - moved), least = Isa::set1(moved + kFarBelow);
  F32 sum[2] = {Isa::set1(0.0f), Isa::set1(0.0f)};
  for (int j = 0; j < keys; j += 2 * kL) {
    F32 p[2];
    unroll<2>([&](auto i) __attribute__((always_inline)) {
      const F32 s = Isa::load(scores + j + i * kL);
      if constexpr (kType == KvType::kF32)
        p[i] = power(kPrecise, s, base, least);
      else
        p[i] = power(kForBf16, s, base, least);
    });
    if constexpr (kType == KvType::kF32) {
      unroll<2>([&](auto i) __attribute__((always_inline)) {
        Isa::store(scores + j + i * kL, p[i]);
        sum[i] = Isa::add(sum[i], p[i]);
      });
    } else {
      if constexpr (kType == KvType::kS8)
        unroll<2>([&](auto i) __attribute__((always_inline)) {
          p[i] = Isa::mul(p[i], Isa::load(memory.scales + j + i * kL));
        });
      const I32 words = Isa::words_bf16(p[0], p[1]);
      const F32 rounded[2] = {Isa::low_bf16(words), Isa::high_bf16(words)};
      unroll<2>([&](auto i) __attribute__((always_inline)) {
        if constexpr (kType == KvType::kS8)
          sum[i] = Isa::fma(rounded[i], Isa::load(memory.inverse + i * (kGroupKeys / 2) + j / 2), sum[i]);
        else
          sum[i] = Isa::add(sum[i], rounded[i]);
      });
      put_weights<kWeights>(at, j, words);
    }
  }
  memory.top[row] = top;
  memory.sum[row] = Isa::sum_of(Isa::add(sum[0], sum[1]));
}

// kLanes rows of two stretches, as AttentionKernels::merge has it.
KT_INLINE void merge_rows(float* top, float* sum, float* next_top, float* next_sum) {
  const F32 a = Isa::load(top), b = Isa::load(next_top), most = Isa::max(a, b);
  const auto factor = [&](F32 x) __attribute__((always_inline)) {
    const F32 below = Isa::sub(x, most);
    return Isa::zero_under(Isa::exp2_above(Isa::add(below, Isa::set1(kWhole))), below, Isa::set1(kFarBelow));
  };
  const F32 mine = factor(a), its = factor(b);
  Isa::store(sum, Isa::fma(Isa::load(next_sum), its, Isa::mul(Isa::load(sum), mine)));
  Isa::store(top, most);
  Isa::store(next_top, mine);
  Isa::store(next_sum, its);
}

// The group's tops and sums become the rows', those of `memory` the factors for what put_out joins.
KT_INLINE void merge_group(const AttendArgs& args, const Memory& memory) {
  for (int r = 0; r < AttendSums::padded(args.rows); r += Isa::kLanes) {
    if (args.first) {
      Isa::store(args.sums.top + r, Isa::load(memory.top + r));
      Isa::store(args.sums.sum + r, Isa::load(memory.sum + r));
    } else {
      merge_rows(args.sums.top + r, args.sums.sum + r, memory.top + r, memory.sum + r);
    }
  }
}

template <KvType kType, Weights kWeights, class Fetch>
KT_INLINE void soften(const AttendArgs& args, const Memory& memory, Fetch& ahead) {
  if constexpr (kType == KvType::kS8) take_scales(args, memory);
  for (int row = 0; row < args.rows; ++row) {
    ahead.fetch();
    soften_row<kType, kWeights>(args, memory, row);
  }
  merge_group(args, memory);
}

KT_INLINE void put_out(const AttendArgs& args, const Memory& memory, int row, int column, F32 found) {
  float* out = args.sums.out + int64_t{row} * args.dv + column;
  if (!args.first)
    found = Isa::fma(found, Isa::set1(memory.sum[row]), Isa::mul(Isa::load(out), Isa::set1(memory.top[row])));
  Isa::store(out, found);
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
