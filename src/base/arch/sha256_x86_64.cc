// SHA-256 with x86's SHA extensions: two rounds in an instruction, on the state split as (a, b, e, f) and
// (c, d, g, h), first word in the highest lane.
#include <immintrin.h>

#include "base/sha256_blocks.h"

namespace kt::inline base {

void sha256_instructions(uint32_t* state, const std::byte* blocks, size_t count) noexcept {
  const auto word = [state](int i) { return static_cast<int>(state[i]); };
  __m128i abef = _mm_set_epi32(word(0), word(1), word(4), word(5));
  __m128i cdgh = _mm_set_epi32(word(2), word(3), word(6), word(7));
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  for (; count > 0; --count, blocks += 64) {
    __m128i w[4];
    for (int i = 0; i < 4; ++i)
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks + 16 * i)), swap);
    const __m128i abef_before = abef, cdgh_before = cdgh;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m128i sum =
          _mm_add_epi32(w[i % 4], _mm_loadu_si128(reinterpret_cast<const __m128i*>(kSha256Rounds + 4 * i)));
      if (i < 12) {
        const __m128i seven_back = _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4);
        w[i % 4] = _mm_sha256msg2_epu32(
            _mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]), seven_back), w[(i + 3) % 4]);
      }
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  alignas(16) uint32_t first[4], second[4];  // f e b a; h g d c
  _mm_store_si128(reinterpret_cast<__m128i*>(first), abef);
  _mm_store_si128(reinterpret_cast<__m128i*>(second), cdgh);
  state[0] = first[3], state[1] = first[2], state[4] = first[1], state[5] = first[0];
  state[2] = second[3], state[3] = second[2], state[6] = second[1], state[7] = second[0];
}

}  // namespace kt::inline base
