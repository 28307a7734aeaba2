// Squares of numbers transposed, for panels whose K are the rows of a matrix (transpose.inl.h) and for operands of
// tiles (gram.inl.h). Beyond the vocabulary, so that what multiplies is not compiled again for it; without intrinsics
// but where registers of 512 bits halve the shuffles.
#pragma once
#include "kernels/isa/inline.h"

namespace KT_ISA_NAMESPACE {
namespace {

#ifdef __AVX512F__
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
// The same, 4 x 4 at a time.
KT_INLINE void transpose_words(const uint8_t* from, uint8_t* to) {
  using Four = float __attribute__((vector_size(16)));
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 16; j += 4) {
      Four row[4], out[4];
      for (int r = 0; r < 4; ++r) __builtin_memcpy(&row[r], from + (i + r) * 64 + j * 4, 16);
      const Four a = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
      const Four b = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
      const Four c = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
      const Four d = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
      out[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5), out[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
      out[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5), out[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
      for (int r = 0; r < 4; ++r) __builtin_memcpy(to + (j + r) * 64 + i * 4, &out[r], 16);
    }
}
#endif

// 16 x 16 bf16 numbers in the packed order of bf16 codes, rows for columns: [16 / step][16][step] either way.
template <class I>
KT_INLINE void transpose_steps(const uint8_t* from, uint8_t* to) {
  if constexpr (I::kStep == 4) {
    constexpr int kSide = I::kTurn;  // words each way
    for (int i = 0; i < 8; i += kSide)
      for (int j = 0; j < 8; j += kSide) I::turn(from + i * 64 + j * 8, 64, to + j * 64 + i * 8, 64);
  } else {
    static_assert(I::kStep == 8);
    using Eight = uint16_t __attribute__((vector_size(16)));
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 4; ++j) {  // 4 rows of 4
        Eight rows[2];
        __builtin_memcpy(rows, from + i * 128 + j * 32, 32);
        const Eight even = __builtin_shufflevector(rows[0], rows[1], 0, 2, 4, 6, 8, 10, 12, 14);
        const Eight odd = __builtin_shufflevector(rows[0], rows[1], 1, 3, 5, 7, 9, 11, 13, 15);
        const Eight out[2] = {__builtin_shufflevector(even, odd, 0, 2, 4, 6, 8, 10, 12, 14),
                              __builtin_shufflevector(even, odd, 1, 3, 5, 7, 9, 11, 13, 15)};
        __builtin_memcpy(to + j * 128 + i * 32, out, 32);
      }
  }
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
