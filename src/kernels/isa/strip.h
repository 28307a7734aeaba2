// What symmetric updates need of an ISA beyond its vocabulary: two rows of bf16 side by side, tiles loaded past L1.
#pragma once
#include "kernels/isa/squares.h"
#include "kernels/isa/tiled.h"

namespace KT_ISA_NAMESPACE {
namespace {

#ifdef __AVX512BF16__
inline constexpr bool kPairsRows = true;

// 16 columns of two rows of bf16, as store_bf16_step would store them.
template <class I>
KT_INLINE typename I::Bytes pair_rows(const uint8_t* a, const uint8_t* b) {
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(Avx512::load_256(a)), Avx512::load_256(b), 1);
  const __m512i order =
      _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                        0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
  return {_mm512_permutexvar_epi16(order, both)};
}
#else
inline constexpr bool kPairsRows = false;
template <class I>
typename I::Bytes pair_rows(const uint8_t* a, const uint8_t* b);
#endif

template <class Unit, class Base>
Unit unit_of(const TiledIsa<Unit, Base>&);  // for decltype

// A tile that is read once: it leaves no trace in L1.
template <int kTile, class Unit>
KT_INLINE void load_past(Unit& unit, const void* from, int64_t stride) {
#ifdef __AMX_TILE__
  (void)unit;
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(stride) : "memory");
#else
  unit.template load<kTile>(from, stride);
#endif
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
