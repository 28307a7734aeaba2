// For tests only: the tile loops of amx.h over an emulated unit and the portable vocabulary, on any CPU.
#pragma once
#include "kernels/isa/portable.h"
#include "kernels/isa/tile_unit_emulated.h"
#include "kernels/isa/tiled.h"

namespace KT_ISA_NAMESPACE {
namespace {

struct PortableBf16 : Portable {
  static constexpr bool kBf16Product = true;
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
