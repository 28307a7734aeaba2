// Work on single rows of f32 (row_ops.h). Bound by reading the rows, which are in L1 or L2.
#pragma once
#include "kernels/few_integer.inl.h"
#include "kernels/math.inl.h"
#include "kernels/row_ops.h"

namespace KT_ISA_NAMESPACE {
namespace {

using kt::CacheRows;
using kt::kKvBlock;
using kt::KvType;

inline constexpr int kChains = 4;  // sums beside one another, to hide the latency

// 16 numbers side by side, whatever the vectors' length.
struct Lanes {
  F32 v[kParts];
};
KT_INLINE Lanes load_lanes(const float* from) {
  Lanes x;
  unroll<kParts>([&](auto i) __attribute__((always_inline)) { x.v[i] = Isa::load(from + i * Isa::kLanes); });
  return x;
}
// The first `count` of 16 numbers; `rest` for the others.
KT_INLINE Lanes load_some(const float* from, int count, float rest) {
  if (count >= kBlockRows) return load_lanes(from);
  alignas(64) float some[kBlockRows];
  for (int i = 0; i < kBlockRows; ++i) some[i] = rest;
  __builtin_memcpy(some, from, static_cast<size_t>(count) * sizeof(float));
  return load_lanes(some);
}
KT_INLINE void store_some(float* to, int count, const Lanes& x) {
  alignas(64) float some[kBlockRows];
  float* at = count >= kBlockRows ? to : some;
  unroll<kParts>([&](auto i) __attribute__((always_inline)) { Isa::store(at + i * Isa::kLanes, x.v[i]); });
  if (at == some) __builtin_memcpy(to, some, static_cast<size_t>(count) * sizeof(float));
}
template <class F>
KT_INLINE Lanes each(F&& f) {
  Lanes x;
  unroll<kParts>([&](auto i) __attribute__((always_inline)) { x.v[i] = f(i); });
  return x;
}

// The lanes' sum, halves added to halves.
KT_INLINE float sum_of(const Lanes& x) {
  alignas(64) float lane[kBlockRows];
  store_some(lane, kBlockRows, x);
  for (int n = kBlockRows / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) lane[i] += lane[i + n];
  return lane[0];
}

float dot(const float* x, const float* y, int n) noexcept {
  Lanes chain[kChains];
  for (Lanes& sum : chain) sum = each([](auto) __attribute__((always_inline)) { return Isa::set1(0.0f); });
  const auto add = [&](int at, Lanes& sum) __attribute__((always_inline)) {
    const Lanes v = load_some(x + at, n - at, 0.0f), w = load_some(y + at, n - at, 0.0f);
    sum = each([&](auto i) __attribute__((always_inline)) { return Isa::fma(v.v[i], w.v[i], sum.v[i]); });
  };
  int at = 0;
  for (; at + kChains * kBlockRows <= n; at += kChains * kBlockRows)
    unroll<kChains>([&](auto c) __attribute__((always_inline)) { add(at + c * kBlockRows, chain[c]); });
  for (; at < n; at += kBlockRows) add(at, chain[at / kBlockRows % kChains]);
  return sum_of(each([&](auto i) __attribute__((always_inline)) {
    return Isa::add(Isa::add(chain[0].v[i], chain[1].v[i]), Isa::add(chain[2].v[i], chain[3].v[i]));
  }));
}

void norm(const float* x, const float* weight, float eps, int n, float* y) noexcept {
  const float factor = 1 / __builtin_sqrtf(dot(x, x, n) / static_cast<float>(n) + eps);
  for (int at = 0; at < n; at += kBlockRows) {
    const Lanes v = load_some(x + at, n - at, 0.0f), w = load_some(weight + at, n - at, 0.0f);
    store_some(y + at, n - at, each([&](auto i) __attribute__((always_inline)) {
                 return Isa::mul(Isa::mul(v.v[i], Isa::set1(factor)), w.v[i]);
               }));
  }
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* y) noexcept {
  Lanes sum = each([](auto) __attribute__((always_inline)) { return Isa::set1(0.0f); });
  for (int at = 0; at < n; at += kBlockRows) {
    const Lanes v = load_some(x + at, n - at, 0.0f);
    sum = each([&](auto i) __attribute__((always_inline)) { return Isa::add(sum.v[i], v.v[i]); });
  }
  const float mean = sum_of(sum) / static_cast<float>(n);
  for (int at = 0; at < n; at += kBlockRows) {
    const Lanes v = load_some(x + at, n - at, 0.0f);
    store_some(y + at, n - at, each([&](auto i) __attribute__((always_inline)) {
                 return Isa::sub(v.v[i], Isa::set1(mean));
               }));
  }
  norm(y, weight, eps, n, y);
  for (int at = 0; at < n; at += kBlockRows) {
    const Lanes v = load_some(y + at, n - at, 0.0f), b = load_some(bias + at, n - at, 0.0f);
    store_some(y + at, n - at,
               each([&](auto i) __attribute__((always_inline)) { return Isa::add(v.v[i], b.v[i]); }));
  }
}

void rotate(const kt::RotateArgs& args) noexcept {
  for (int h = 0; h < args.heads; ++h) {
    float* head = args.x + h * args.stride;
    int i = 0;
    if (!args.interleaved)
      for (; i + Isa::kLanes <= args.half; i += Isa::kLanes) {
        const F32 a = Isa::load(head + i), b = Isa::load(head + args.half + i);
        const F32 c = Isa::load(args.cosines + i), s = Isa::load(args.sines + i);
        Isa::store(head + i, Isa::sub(Isa::mul(a, c), Isa::mul(b, s)));
        Isa::store(head + args.half + i, Isa::add(Isa::mul(b, c), Isa::mul(a, s)));
      }
    for (; i < args.half; ++i) {
      float* first = head + (args.interleaved ? 2 * i : i);
      float* second = args.interleaved ? first + 1 : first + args.half;
      const float a = *first, b = *second, c = args.cosines[i], s = args.sines[i];
      *first = a * c - b * s;
      *second = b * c + a * s;
    }
  }
}

void softmax(float* x, int n) noexcept {
  Lanes most = load_some(x, n, -__builtin_inff());
  for (int at = kBlockRows; at < n; at += kBlockRows) {
    const Lanes v = load_some(x + at, n - at, -__builtin_inff());
    most = each([&](auto i) __attribute__((always_inline)) { return Isa::max(most.v[i], v.v[i]); });
  }
  alignas(64) float lane[kBlockRows];
  store_some(lane, kBlockRows, most);
  float top = lane[0];
  for (const float one : lane) top = one > top ? one : top;
  Lanes sum = each([](auto) __attribute__((always_inline)) { return Isa::set1(0.0f); });
  for (int at = 0; at < n; at += kBlockRows) {
    const Lanes v = load_some(x + at, n - at, 0.0f);
    const Lanes p =
        each([&](auto i) __attribute__((always_inline)) { return exp(Isa::sub(v.v[i], Isa::set1(top))); });
    store_some(x + at, n - at, p);
    const Lanes real = load_some(x + at, n - at, 0.0f);
    sum = each([&](auto i) __attribute__((always_inline)) { return Isa::add(sum.v[i], real.v[i]); });
  }
  const F32 total = Isa::set1(sum_of(sum));
  for (int at = 0; at < n; at += kBlockRows) {
    const Lanes v = load_some(x + at, n - at, 0.0f);
    store_some(x + at, n - at,
               each([&](auto i) __attribute__((always_inline)) { return Isa::div(v.v[i], total); }));
  }
}

void sigmoid_row(float* x, int n) noexcept {
  for (int at = 0; at < n; at += kBlockRows) {
    const Lanes v = load_some(x + at, n - at, 0.0f);
    store_some(x + at, n - at, each([&](auto i) __attribute__((always_inline)) { return sigmoid(v.v[i]); }));
  }
}

// Codes of a row's columns [at, at + 16), which are zeros past its width.
template <KvType kType, class Code>
KT_INLINE void encode(const CacheRows& args, const float* row, int at, float inverse, Code* codes) {
  const Lanes v = load_some(row + at, args.width - at, 0.0f);
  unroll<kParts>([&](auto i) __attribute__((always_inline)) {
    Code* to = codes + i * Isa::kLanes;
    if constexpr (kType == KvType::kF32)
      Isa::store(reinterpret_cast<float*>(to), v.v[i]);
    else if constexpr (kType == KvType::kBf16)
      Isa::store_bf16(to, v.v[i]);
    else
      Isa::store_s8(reinterpret_cast<int8_t*>(to), Isa::round(Isa::mul(v.v[i], Isa::set1(inverse))));
  });
}

KT_INLINE float largest_of(const float* row, int width) {
  Lanes most = each([](auto) __attribute__((always_inline)) { return Isa::set1(0.0f); });
  for (int at = 0; at < width; at += kBlockRows) {
    const Lanes v = load_some(row + at, width - at, 0.0f);
    most = each([&](auto i) __attribute__((always_inline)) { return Isa::max(most.v[i], Isa::abs(v.v[i])); });
  }
  float top = 0;
  alignas(64) float lane[kBlockRows];
  store_some(lane, kBlockRows, most);
  for (const float one : lane) top = one > top ? one : top;
  return top;
}

// Rows are taken as many together as a word of the block holds, where they fill one: words are stored whole then.
template <KvType kType, class Code>
__attribute__((noinline)) void write_rows(const CacheRows& args) {
  constexpr int kPack = kt::kv_pack(kType);
  auto* words = static_cast<uint32_t*>(args.block);
  float inverse[kKvBlock] = {};
  for (int r = 0; r < args.count && kType == KvType::kS8; ++r) {
    const float scale = largest_of(args.rows + r * args.stride, args.width) / 127;
    args.scales[args.slot + r] = scale;
    inverse[r] = scale > 0 ? 1 / scale : 0;
  }
  for (int r = 0, together; r < args.count; r += together) {
    const int slot = args.slot + r;
    together = !args.keys && slot % kPack == 0 && args.count - r >= kPack ? kPack : 1;
    for (int at = 0; at < args.width; at += kBlockRows) {
      alignas(64) Code codes[kPack][kBlockRows];
      for (int j = 0; j < together; ++j)
        encode<kType>(args, args.rows + (r + j) * args.stride, at, inverse[r + j], codes[j]);
      uint32_t* to = words + int64_t{slot / kPack} * args.width_pad + at;
      if (args.keys) {
        uint32_t word[kBlockRows / kPack];
        __builtin_memcpy(word, codes[0], sizeof word);
        for (int w = 0; w < kBlockRows / kPack; ++w)
          words[int64_t{at / kPack + w} * kKvBlock + slot] = word[w];
      } else if (together == kPack) {
        for (int c = 0; c < kBlockRows; ++c) {
          uint32_t word = codes[0][c];
          for (int j = 1; j < kPack; ++j) word |= uint32_t{codes[j][c]} << (j * 32 / kPack);
          to[c] = word;
        }
      } else {
        for (int c = 0; c < kBlockRows; ++c) reinterpret_cast<Code*>(to + c)[slot % kPack] = codes[0][c];
      }
    }
  }
}

void write_cache(const CacheRows& args) noexcept {
  if (args.type == KvType::kF32)
    write_rows<KvType::kF32, uint32_t>(args);
  else if (args.type == KvType::kBf16)
    write_rows<KvType::kBf16, uint16_t>(args);
  else
    write_rows<KvType::kS8, uint8_t>(args);
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
