// What symmetric updates need of an ISA beyond its vocabulary: two rows of bf16 side by side, words transposed,
// tiles loaded past L1.
#pragma once
#include "kernels/isa/tiled.h"

namespace KT_ISA_NAMESPACE {
namespace {

#ifdef __AVX512BF16__
inline constexpr bool kPairsRows = true;

// 16 columns of two rows of bf16, as store_bf16_step would store them.
template <class I>
KT_INLINE typename I::Bytes pair_rows(const uint8_t* a, const uint8_t* b) {
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(Avx512::load_256(a)), Avx512::load_256(b), 1);
  const __m512i order = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                          0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
  return {_mm512_permutexvar_epi16(order, both)};
}

// 16 x 16 words of 4 bytes: quarters of rows gathered by the loads, then two rounds of unpacking.
KT_INLINE void transpose_words(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < 4; ++i, to += 256) {
    __m512i q[4];
    for (int j = 0; j < 4; ++j) {
      const uint8_t* at = from + j * 64 + i * 16;
      const auto quarter = [&](int row) __attribute__((always_inline)) { return Avx512::load_128(at + row * 64); };
      q[j] = _mm512_inserti32x4(_mm512_castsi128_si512(quarter(0)), quarter(4), 1);
      q[j] = _mm512_inserti32x4(_mm512_inserti32x4(q[j], quarter(8), 2), quarter(12), 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(q[0], q[1]), b = _mm512_unpackhi_epi32(q[0], q[1]);
    const __m512i c = _mm512_unpacklo_epi32(q[2], q[3]), d = _mm512_unpackhi_epi32(q[2], q[3]);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi64(a, c));
    _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi64(a, c));
    _mm512_storeu_si512(to + 128, _mm512_unpacklo_epi64(b, d));
    _mm512_storeu_si512(to + 192, _mm512_unpackhi_epi64(b, d));
  }
}
#else
inline constexpr bool kPairsRows = false;
template <class I>
typename I::Bytes pair_rows(const uint8_t* a, const uint8_t* b);

KT_INLINE void transpose_words(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) std::memcpy(to + j * 64 + i * 4, from + i * 64 + j * 4, 4);
}
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
