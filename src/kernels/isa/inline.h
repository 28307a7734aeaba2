// Small things every ISA header shares. Everything is forced inline: a symbol emitted here would be compiled
// with one ISA's flags and could be linked into another's.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#define KT_INLINE inline __attribute__((always_inline))

namespace KT_ISA_NAMESPACE {
namespace {

template <int N>
struct Int {
  static constexpr int value = N;
  constexpr operator int() const { return N; }
};

// unroll<N>(f): f(Int<0>{}), ..., f(Int<N-1>{}), a loop whose index is a compile-time constant;
// unroll_from<A, B> starts at A. An object and a fold, so that one call stands between a loop and its body:
// g++ copies and cleans up the body once for each always-inline call around it, which is half the time it
// takes to compile a row.
template <int kFrom, class Sequence>
struct Unroll;
template <int kFrom, int... kI>
struct Unroll<kFrom, std::integer_sequence<int, kI...>> {
  template <class F>
  KT_INLINE void operator()(F&& f) const {
    (f(Int<kFrom + kI>{}), ...);
  }
};
template <int kFrom, int kTo>
inline constexpr Unroll<kFrom, std::make_integer_sequence<int, kTo - kFrom>> unroll_from{};
template <int N>
inline constexpr Unroll<0, std::make_integer_sequence<int, N>> unroll{};

// T, but known only once the template around it is: members that T lacks are looked up in the branch taken.
template <class T, auto...>
struct Late {
  using type = T;
};

constexpr KT_INLINE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
constexpr KT_INLINE uint32_t bits_of(float f) { return __builtin_bit_cast(uint32_t, f); }
KT_INLINE uint16_t u16_at(const uint8_t* p) { uint16_t v; std::memcpy(&v, p, 2); return v; }
KT_INLINE void put_u16(uint8_t* p, uint16_t v) { std::memcpy(p, &v, 2); }

KT_INLINE float f16_to_f32(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest >= 0x400u) return float_of(sign | ((rest << 13) + 0x38000000u));
  const float small = static_cast<float>(rest) * 0x1p-24f;
  return float_of(bits_of(small) | sign);
}
KT_INLINE uint16_t f32_to_bf16(float f) {
  const uint32_t u = bits_of(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(u >> 16 | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
KT_INLINE uint16_t f32_to_f16(float f) {
  const uint32_t u = bits_of(f), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (a >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (a < 0x38800000u)  // subnormal: adding 2^-14 * 2^10 leaves the rounded multiple of 2^-24 in the low bits
    return static_cast<uint16_t>(sign | (bits_of(float_of(a) + 0.5f) - 0x3f000000u));
  return static_cast<uint16_t>(sign | ((a + 0xfffu + (a >> 13 & 1u)) - 0x38000000u) >> 13);
}
constexpr KT_INLINE float e4m3_to_f32(uint8_t b) {
  const uint32_t sign = (b & 0x80u) << 24, e = b >> 3 & 15u, m = b & 7u;
  if (e == 0) return float_of(bits_of(static_cast<float>(m) * 0x1p-9f) | sign);
  return float_of(sign | (e + 120u) << 23 | m << 20);
}
KT_INLINE float e2m1_to_f32(uint8_t code) {
  constexpr float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return code & 8 ? -values[code & 7] : values[code & 7];
}

// A panel of weights: `blocks` row blocks, `stride` bytes apart. Where a tile unit takes them, step s of K stands at
// (phase + 1024 * s) & mask of each: a panel made beside the products that take it needs no more than a ring.
struct Panel {
  const uint8_t* at = nullptr;
  int64_t stride = 0;
  int blocks = 0;
  int64_t phase = 0, mask = -1;
};

// Bytes to have in L2 by the time the next panel is made or read: stretches, fetched a few lines at each step of
// the tile loop, so that memory is read while the tiles multiply.
struct Ahead {
  const uint8_t* at = nullptr;
  const uint8_t* end = nullptr;
  int64_t stride = 0;  // from the end of a stretch to the start of the next
  int64_t bytes = 0;   // of a stretch
  int more = 0;        // stretches after this one
  int lines = 0;       // a step
  KT_INLINE void fetch() {
    for (int i = 0; i < lines && at < end; ++i, at += 64) __builtin_prefetch(at, 0, 2);
    turn();
  }
  // Four lines whatever `lines` says, and so up to three past a stretch.
  KT_INLINE void fetch_four() {
    if (at < end) {
      unroll<4>([&](auto i) __attribute__((always_inline)) { __builtin_prefetch(at + 64 * i, 0, 2); });
      at += 256;
    } else {
      turn();
    }
  }
  KT_INLINE void turn() {
    if (at >= end && more) {
      at = end + stride;
      end = at + bytes;
      --more;
    }
  }
};

}  // namespace
}  // namespace KT_ISA_NAMESPACE
