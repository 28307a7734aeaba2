// Attention of query rows over one block of keys and values (attention.h).
//
// Scores: keys lie across lanes, so a row's sums need no adding across; every word of keys is widened once
// for several rows. Output: columns lie across lanes, likewise. A sum of products runs over 16 words of K at
// a time, one partial sum for each number of a word; the partial sums are joined and added to the total. That
// is what a tile unit does with bf16, whose products are exact in f32: both routes give the same bits,
// denormals aside. FMA bound when the block is in L2; few rows are bound by reading the cache. Error: f32
// sums of d and of kKvBlock terms; kBf16 also rounds p, at most 2^-9 of each.
#pragma once
#include "kernels/attention.h"
#include "kernels/math.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

using kt::AttendArgs;
using kt::kKvBlock;
using kt::KvType;

inline constexpr int kWordsAtOnce = 16;                    // of K, of one partial sum
inline constexpr int kVectors = Isa::kLanes == 8 ? 1 : 2;  // side by side: half the registers of AVX2
constexpr int query_rows(KvType type) { return type == KvType::kS8 ? 2 : 4; }
inline constexpr int kLeastTileRows = 3;  // fewer are done sooner without tiles
inline constexpr float kUnseen = -3.0e38f;
inline constexpr float kFarBelow =
    -69.0f;  // e^this is about 2^-100: what is less counts as 0, so no product is denormal

template <KvType kType>
KT_INLINE void load_words(const uint8_t* at, F32 (&out)[kt::kv_pack(kType)]) {
  if constexpr (kType == KvType::kF32) {
    out[0] = Isa::load(reinterpret_cast<const float*>(at));
  } else {
    const I32 words = Isa::load(reinterpret_cast<const int32_t*>(at));
    if constexpr (kType == KvType::kBf16) {
      out[0] = Isa::low_bf16(words);
      out[1] = Isa::high_bf16(words);
    } else {
      unroll<4>([&](auto j) __attribute__((always_inline)) { out[j] = Isa::template byte_s8<j>(words); });
    }
  }
}

// The next blocks, a few lines at each of `steps` steps.
KT_INLINE Ahead ahead_of(const AttendArgs& args, int64_t steps) {
  Ahead ahead;
  if (!args.next_k) return ahead;
  ahead.at = static_cast<const uint8_t*>(args.next_k);
  ahead.end = ahead.at + args.next_k_bytes;
  ahead.stride = static_cast<const uint8_t*>(args.next_v) - ahead.end;
  ahead.bytes = args.next_v_bytes;
  ahead.more = 1;
  ahead.lines = static_cast<int>((args.next_k_bytes + args.next_v_bytes) / 64 / (steps > 0 ? steps : 1)) + 1;
  return ahead;
}

// c[r][lane] = sum over `words` words of x[r * x_stride + number] * (numbers of the words at w, w + w_stride,
// ...), for kV vectors side by side.
template <KvType kType, int kRows, int kV>
KT_INLINE void sum_words(const float* x, int64_t x_stride, const uint8_t* w, int64_t w_stride, int words,
                         F32 (&total)[kRows][kV], Ahead& ahead) {
  constexpr int kPack = kt::kv_pack(kType);
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    unroll<kV>([&](auto v) __attribute__((always_inline)) { total[r][v] = Isa::set1(0.0f); });
  });
  for (int first = 0; first < words; first += kWordsAtOnce) {
    const int last = first + kWordsAtOnce < words ? first + kWordsAtOnce : words;
    ahead.fetch();
    F32 part[kRows][kV][kPack];
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      unroll<kV>([&](auto v) __attribute__((always_inline)) {
        unroll<kPack>([&](auto j) __attribute__((always_inline)) { part[r][v][j] = Isa::set1(0.0f); });
      });
    });
    for (int s = first; s < last; ++s) {
      F32 numbers[kV][kPack];
      unroll<kV>([&](auto v) __attribute__((always_inline)) {
        load_words<kType>(w + s * w_stride + v * Isa::kLanes * 4, numbers[v]);
      });
      unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        unroll<kPack>([&](auto j) __attribute__((always_inline)) {
          const F32 a = Isa::set1(x[r * x_stride + s * kPack + j]);
          unroll<kV>([&](auto v) __attribute__((always_inline)) {
            part[r][v][j] = Isa::fma(a, numbers[v][j], part[r][v][j]);
          });
        });
      });
    }
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      unroll<kV>([&](auto v) __attribute__((always_inline)) {
        F32 joined = part[r][v][0];
        if constexpr (kPack == 2) joined = Isa::add(joined, part[r][v][1]);
        if constexpr (kPack == 4)
          joined = Isa::add(Isa::add(joined, part[r][v][1]), Isa::add(part[r][v][2], part[r][v][3]));
        total[r][v] = Isa::add(total[r][v], joined);
      });
    });
  }
}

template <KvType kType, int kRows>
KT_INLINE void score_rows(const AttendArgs& args, int row, Ahead& ahead) {
  const float* q = args.q + static_cast<int64_t>(row) * args.d;
  float* scores = args.scores + static_cast<int64_t>(row) * kKvBlock;
  const auto* k = static_cast<const uint8_t*>(args.k);
  const int words = args.d / kt::kv_pack(kType);
  for (int key = 0; key < args.keys; key += kVectors * Isa::kLanes) {
    F32 sums[kRows][kVectors];
    sum_words<kType, kRows, kVectors>(q, args.d, k + key * 4, kKvBlock * 4, words, sums, ahead);
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        const int at = key + v * Isa::kLanes;
        if constexpr (kType == KvType::kS8) sums[r][v] = Isa::mul(sums[r][v], Isa::load(args.k_scales + at));
        Isa::store(scores + r * kKvBlock + at, sums[r][v]);
      });
    });
  }
}

// Turns a row of scores into weights e^(s - top), zeros where a key is not seen, and brings the row's sum up
// to date; what out has to be multiplied with goes to `shrink`. kS8 weights are multiplied with the scales of
// their values.
template <KvType kType>
KT_INLINE void soften_row(const AttendArgs& args, int row) {
  float* scores = args.scores + static_cast<int64_t>(row) * kKvBlock;
  const int begin = args.begin[row] > 0 ? args.begin[row] : 0,
            end = args.end[row] < args.keys ? args.end[row] : args.keys;
  for (int j = 0; j < begin && j < kKvBlock; ++j) scores[j] = kUnseen;
  for (int j = end > 0 ? end : 0; j < kKvBlock; ++j) scores[j] = kUnseen;
  F32 most = Isa::set1(kUnseen);
  for (int j = 0; j < kKvBlock; j += Isa::kLanes) most = Isa::max(most, Isa::load(scores + j));
  const float old = args.top[row], found = Isa::max_of(most);
  const bool blind = begin >= end;
  const float top = blind || old > found ? old : found;
  F32 sum = Isa::set1(0.0f);
  for (int j = 0; j < kKvBlock; j += Isa::kLanes) {
    const F32 x = Isa::sub(Isa::load(scores + j), Isa::set1(blind ? 0.0f : top));
    F32 p = Isa::zero_below(exp(x), x, Isa::set1(kFarBelow));
    if constexpr (kType == KvType::kBf16) {
      p = Isa::round_bf16(p);
      Isa::store_high(static_cast<uint8_t*>(args.weights) + (static_cast<int64_t>(row) * kKvBlock + j) * 2,
                      p);
    }
    sum = Isa::add(sum, Isa::add(p, Isa::sub(x, x)));  // a score that is no number makes the row none
    if constexpr (kType == KvType::kS8) p = Isa::mul(p, Isa::load(args.v_scales + j));
    Isa::store(scores + j, p);
  }
  args.shrink[row] = 1.0f;
  if (blind) return;
  args.top[row] = top;
  if (old != top) {
    alignas(64) float factor[Isa::kLanes];
    Isa::store(factor,
               Isa::zero_below(exp(Isa::set1(old - top)), Isa::set1(old - top), Isa::set1(kFarBelow)));
    args.shrink[row] = factor[0];
  }
  args.sum[row] = args.sum[row] * args.shrink[row] + Isa::sum_of(sum);
}

KT_INLINE void add_to_out(const AttendArgs& args, int row, int column, F32 found) {
  float* out = args.out + static_cast<int64_t>(row) * args.dv + column;
  Isa::store(out, Isa::fma(Isa::load(out), Isa::set1(args.shrink[row]), found));
}

template <KvType kType, int kRows>
KT_INLINE void add_values(const AttendArgs& args, int row, Ahead& ahead) {
  constexpr int kPack = kt::kv_pack(kType);
  const float* p = args.scores + static_cast<int64_t>(row) * kKvBlock;
  const auto* v = static_cast<const uint8_t*>(args.v);
  const int words = (args.keys + kPack - 1) / kPack;
  for (int c = 0; c < args.dv; c += kVectors * Isa::kLanes) {
    F32 sums[kRows][kVectors];
    sum_words<kType, kRows, kVectors>(p, kKvBlock, v + c * 4, int64_t{args.v_width} * 4, words, sums, ahead);
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      unroll<kVectors>([&](auto i) __attribute__((always_inline)) {
        add_to_out(args, row + r, c + i * Isa::kLanes, sums[r][i]);
      });
    });
  }
}

template <KvType kType>
__attribute__((noinline)) void attend_rows(const AttendArgs& args) {
  constexpr int kRows = query_rows(kType), kPack = kt::kv_pack(kType), kWide = kVectors * Isa::kLanes;
  const int64_t groups = args.rows / kRows + args.rows % kRows;
  Ahead ahead =
      ahead_of(args, groups * ((args.keys + kWide - 1) / kWide * (args.d / kPack / kWordsAtOnce) +
                               args.dv / kWide * ((args.keys / kPack + kWordsAtOnce) / kWordsAtOnce)));
  int row = 0;
  for (; row + kRows <= args.rows; row += kRows) score_rows<kType, kRows>(args, row, ahead);
  for (; row < args.rows; ++row) score_rows<kType, 1>(args, row, ahead);
  for (row = 0; row < args.rows; ++row) soften_row<kType>(args, row);
  for (row = 0; row + kRows <= args.rows; row += kRows) add_values<kType, kRows>(args, row, ahead);
  for (; row < args.rows; ++row) add_values<kType, 1>(args, row, ahead);
}

// The same with a tile unit; a template, so that it is only looked at where there is one.
template <class Tiled>
__attribute__((noinline)) void attend_tiles(const AttendArgs& args) {
  constexpr int kSide = 16;
  const auto* q = static_cast<const uint8_t*>(args.q_bf16);
  const auto* k = static_cast<const uint8_t*>(args.k);
  const auto* v = static_cast<const uint8_t*>(args.v);
  const auto* p = static_cast<const uint8_t*>(args.weights);
  const int64_t q_stride = int64_t{args.d} * 2, p_stride = int64_t{kKvBlock} * 2;
  const int key_steps = args.d / 32, value_steps = (args.keys + 31) / 32;
  const int64_t blocks = (args.rows + 2 * kSide - 1) / (2 * kSide);
  Ahead ahead = ahead_of(args, blocks * ((args.keys + 2 * kSide - 1) / (2 * kSide) * key_steps +
                                         args.dv / (2 * kSide) * value_steps) +
                                   args.rows);
  Tiled::begin_tiles();
  for (int row = 0; row < args.rows; row += 2 * kSide)
    for (int key = 0; key < args.keys; key += 2 * kSide) {
      float* scores = args.scores + static_cast<int64_t>(row) * kKvBlock + key;
      const uint8_t* from = q + row * q_stride;
      if (args.rows - row > kSide)
        Tiled::template plain_block<2, 2>(from, q_stride, k + key * 4, kKvBlock * 4, key_steps, scores,
                                          kKvBlock, ahead);
      else
        Tiled::template plain_block<1, 2>(from, q_stride, k + key * 4, kKvBlock * 4, key_steps, scores,
                                          kKvBlock, ahead);
    }
  for (int row = 0; row < args.rows; ++row) {
    ahead.fetch();
    soften_row<KvType::kBf16>(args, row);
  }
  alignas(64) float found[2 * kSide][2 * kSide];
  for (int row = 0; row < args.rows; row += 2 * kSide) {
    const int rows = args.rows - row < 2 * kSide ? args.rows - row : 2 * kSide;
    for (int c = 0; c < args.dv; c += 2 * kSide) {
      const int64_t v_stride = int64_t{args.v_width} * 4;
      if (rows > kSide)
        Tiled::template plain_block<2, 2>(p + row * p_stride, p_stride, v + c * 4, v_stride, value_steps,
                                          found[0], 2 * kSide, ahead);
      else
        Tiled::template plain_block<1, 2>(p + row * p_stride, p_stride, v + c * 4, v_stride, value_steps,
                                          found[0], 2 * kSide, ahead);
      for (int r = 0; r < rows; ++r)
        for (int i = 0; i < 2 * kSide; i += Isa::kLanes)
          add_to_out(args, row + r, c + i, Isa::load(found[r] + i));
    }
  }
  Tiled::end_tiles();
}

template <class Any>
void attend_bf16(const AttendArgs& args) {
  if constexpr (Any::kTileUnit)
    if (args.rows >= kLeastTileRows) return attend_tiles<Any>(args);
  attend_rows<KvType::kBf16>(args);
}

}  // namespace

void attend(const AttendArgs& args) noexcept {
  if (args.type == KvType::kF32) {
    attend_rows<KvType::kF32>(args);
  } else if (args.type == KvType::kBf16) {
    attend_bf16<Isa>(args);
  } else {
    attend_rows<KvType::kS8>(args);
  }
}

void query(KvType type, const float* from, int columns, float scale, int d, float* q, void* q_bf16) noexcept {
  for (int i = 0; i < columns; ++i) q[i] = from[i] * scale;
  for (int i = columns; i < d; ++i) q[i] = 0;
  if (type != KvType::kBf16) return;
  for (int i = 0; i < d; i += Isa::kLanes) {
    Isa::store_bf16(static_cast<uint8_t*>(q_bf16) + 2 * i, Isa::load(q + i));
    Isa::store(q + i, Isa::load_bf16(static_cast<uint8_t*>(q_bf16) + 2 * i));
  }
}

void join(float* y, float y_factor, const float* x, float x_factor, int n) noexcept {
  const F32 a = Isa::set1(y_factor), b = Isa::set1(x_factor);
  for (int i = 0; i < n; i += Isa::kLanes)
    Isa::store(y + i, Isa::fma(Isa::load(x + i), b, Isa::mul(Isa::load(y + i), a)));
}

void keys_of_values(KvType type, const void* values, int width, void* keys) noexcept {
  if (type == KvType::kBf16) {
    // Two keys by two columns: the halves of two neighbouring words change places.
    const auto* from = static_cast<const uint32_t*>(values);
    auto* to = static_cast<uint32_t*>(keys);
    for (int key = 0; key < kKvBlock; key += 2, from += width)
      for (int c = 0; c < width; c += 2) {
        const uint32_t x = from[c], y = from[c + 1];
        uint32_t* out = to + static_cast<int64_t>(c / 2) * kKvBlock + key;
        out[0] = (x & 0xffff) | y << 16;
        out[1] = x >> 16 | (y & 0xffff0000u);
      }
  } else if (type == KvType::kF32) {
    const auto* from = static_cast<const uint32_t*>(values);
    auto* to = static_cast<uint32_t*>(keys);
    for (int key = 0; key < kKvBlock; ++key, from += width)
      for (int c = 0; c < width; ++c) to[static_cast<int64_t>(c) * kKvBlock + key] = from[c];
  } else {
    const auto* from = static_cast<const uint8_t*>(values);
    auto* to = static_cast<uint8_t*>(keys);
    for (int key = 0; key < kKvBlock; ++key)
      for (int c = 0; c < width; ++c) to[kt::key_place(4, key, c)] = from[kt::value_place(4, width, key, c)];
  }
}

}  // namespace KT_ISA_NAMESPACE
