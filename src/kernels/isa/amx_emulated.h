// For tests only: the tile loops of amx.h over an emulated unit and the portable vocabulary, on any CPU.
#pragma once
#include "kernels/isa/look_up_bytes.h"
#include "kernels/isa/portable.h"
#include "kernels/isa/tile_unit_emulated.h"
#include "kernels/isa/tiled.h"

namespace KT_ISA_NAMESPACE {
namespace {

// The operations of look_up_bytes.h, by the definition of the instructions.
struct PlainBytes {
  struct R { uint8_t v[64]; };
  template <class F> static KT_INLINE R each(F&& f) {
    R r;
    for (int i = 0; i < 64; ++i) r.v[i] = static_cast<uint8_t>(f(i));
    return r;
  }
  static KT_PORTABLE_OP R load(const uint8_t* p) { return each([&](int i) { return p[i]; }); }
  static KT_PORTABLE_OP void store(uint8_t* p, R x) { std::memcpy(p, x.v, 64); }
  static KT_PORTABLE_OP R shuffle(R x, R order) {
    return each([&](int i) { return order.v[i] & 128 ? 0 : x.v[i / 16 * 16 + (order.v[i] & 15)]; });
  }
  static KT_PORTABLE_OP uint64_t tops(R x) {
    uint64_t m = 0;
    for (int i = 0; i < 64; ++i) m |= uint64_t{x.v[i]} >> 7 << i;
    return m;
  }
  static KT_PORTABLE_OP uint64_t both(uint64_t a, uint64_t b) { return a & b; }
  // Words of two bytes shifted, as AVX-512 has no shifts of bytes.
  static KT_PORTABLE_OP R twice(R x) {
    return each([&](int i) { return x.v[i] << 1 | (i % 2 ? x.v[i - 1] >> 7 : 0); });
  }
  static KT_PORTABLE_OP R sixteenth(R x) {
    return each([&](int i) { return x.v[i] >> 4 | (i % 2 ? 0 : x.v[i + 1] << 4); });
  }
  static KT_PORTABLE_OP R permute(R table, R index) {
    return each([&](int i) { return table.v[index.v[i] & 63]; });
  }
  static KT_PORTABLE_OP R permute_some(R x, uint64_t some, R table, R index) {
    return each([&](int i) { return some >> i & 1 ? table.v[index.v[i] & 63] : x.v[i]; });
  }
  static KT_PORTABLE_OP R zip_low(R a, R b) {
    return each([&](int i) { return (i % 2 ? b : a).v[i / 16 * 16 + i % 16 / 2]; });
  }
  static KT_PORTABLE_OP R zip_high(R a, R b) {
    return each([&](int i) { return (i % 2 ? b : a).v[i / 16 * 16 + 8 + i % 16 / 2]; });
  }
  static KT_PORTABLE_OP R windows(R x, R from) {
    return each([&](int i) {
      uint64_t eight = 0;
      std::memcpy(&eight, x.v + i / 8 * 8, 8);
      const int by = from.v[i] & 63;
      return eight >> by | (by ? eight << (64 - by) : 0);
    });
  }
  template <int kBits> static KT_PORTABLE_OP R choose(R a, R b) {
    return each([&](int i) { return (a.v[i] & kBits) | (b.v[i] & ~kBits); });
  }
};

struct PortableBf16 : Portable {
  static constexpr bool kBf16Product = true;
  static constexpr bool kGridTables = true;
  template <int kNumbers, bool kOdd>
  static KT_PORTABLE_OP void look_up_four(const kt::GridTables& t, const uint8_t* index, const uint8_t* signs,
                                          uint8_t* to) {
    look_up_bytes<PlainBytes, kNumbers, kOdd>(t, index, signs, to);
  }
  using AccF = F32;

  template <int kJ, int kBits> static KT_PORTABLE_OP F32 column_above(Bytes a) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<float>((1 << kBits) + a.v[i * kStep + kJ]);
    return r;
  }
  static KT_PORTABLE_OP void store_bf16_step(uint8_t* p, const F32 (&columns)[kStep / 2]) {
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < kStep / 2; ++j) put_u16(p + i * kStep + 2 * j, f32_to_bf16(columns[j].v[i]));
  }
  // The algebra of avx512.h: the bytes of bf16(magnitude * scale), looked up by the code without its sign.
  struct E4m3Table { uint8_t low[128], high[128]; };
  static KT_PORTABLE_OP E4m3Table e4m3_table(float scale) {
    E4m3Table t;
    for (int i = 0; i < 128; ++i) {
      const uint16_t bits = f32_to_bf16(e4m3_to_f32(static_cast<uint8_t>(i)) * scale);
      t.low[i] = static_cast<uint8_t>(bits), t.high[i] = static_cast<uint8_t>(bits >> 8);
    }
    return t;
  }
  static KT_PORTABLE_OP void e4m3_bf16(const E4m3Table& t, Bytes w, Bytes (&out)[2]) {
    for (int i = 0; i < 64; ++i) {
      uint8_t* to = out[i / 8 % 2].v + i / 16 * 16 + i % 8 * 2;
      to[0] = t.low[w.v[i] & 127];
      to[1] = static_cast<uint8_t>(t.high[w.v[i] & 127] ^ (w.v[i] & 128));
    }
  }
  static KT_PORTABLE_OP bool all_equal(F32 a) {
    for (int i = 1; i < kLanes; ++i) if (bits_of(a.v[i]) != bits_of(a.v[0])) return false;
    return true;
  }
  static KT_INLINE AccF zero_accf() { return {}; }
  static KT_PORTABLE_OP void dot_bf16(AccF& acc, Bytes w, Act a) {
    uint8_t act[kStep];
    std::memcpy(act, a.v, kStep);
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < kStep; j += 2)
        acc.v[i] += float_of(uint32_t{u16_at(w.v + i * kStep + j)} << 16) * float_of(uint32_t{u16_at(act + j)} << 16);
  }
  template <int kToken> static KT_INLINE I32 total(const Acc& acc) { return Portable::total<kToken>(acc); }
  template <int kToken>
  static KT_INLINE F32 total(const AccF& acc) {
    F32 r;
    std::memcpy(&r, &acc, sizeof r);
    return r;
  }
};

// Compiled for its tile loops: passes of 8, 4 and 2 rows, most of what there is to compile, are those of portable.h.
struct AmxEmulated : TiledIsa<EmulatedUnit, PortableBf16> {
  static constexpr int kFewPass = 1;
};

}  // namespace
}  // namespace KT_ISA_NAMESPACE
