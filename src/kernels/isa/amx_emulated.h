// For tests only: the tile loops of amx.h over an emulated unit and the portable vocabulary, on any CPU.
#pragma once
#include "kernels/isa/portable.h"
#include "kernels/isa/tile_unit_emulated.h"
#include "kernels/isa/tiled.h"

namespace KT_ISA_NAMESPACE {
namespace {

struct PortableBf16 : Portable {
  static constexpr bool kBf16Product = true;
  struct AccF { float v[kLanes]; };

  static KT_INLINE void store_bf16_step(uint8_t* p, const F32 (&columns)[kStep / 2]) {
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < kStep / 2; ++j) put_u16(p + i * kStep + 2 * j, f32_to_bf16(columns[j].v[i]));
  }
  static KT_INLINE AccF zero_accf() { return {}; }
  static KT_INLINE void dot_bf16(AccF& acc, Bytes w, Act a) {
    uint8_t act[kStep];
    std::memcpy(act, a.v, kStep);
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < kStep; j += 2)
        acc.v[i] += float_of(uint32_t{u16_at(w.v + i * kStep + j)} << 16) * float_of(uint32_t{u16_at(act + j)} << 16);
  }
  template <int kToken> static KT_INLINE I32 total(const Acc& acc) { return Portable::total<kToken>(acc); }
  template <int kToken> static KT_INLINE F32 total(const AccF& acc) { F32 r; std::memcpy(&r, &acc, sizeof r); return r; }
};

struct AmxEmulated : TiledIsa<EmulatedUnit, PortableBf16> {};

}  // namespace
}  // namespace KT_ISA_NAMESPACE
