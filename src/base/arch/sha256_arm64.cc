// SHA-256 with the instructions of ARMv8's cryptographic extension: four rounds in a pair of instructions,
// bound by their latency.
#include <arm_neon.h>

#include "base/sha256_blocks.h"

namespace kt::inline base {

void sha256_instructions(uint32_t* state, const std::byte* blocks, size_t count) noexcept {
  uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
  for (; count > 0; --count, blocks += 64) {
    uint32x4_t w[4];
    for (int i = 0; i < 4; ++i)
      w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(blocks) + 16 * i)));
    const uint32x4_t abcd_before = abcd, efgh_before = efgh;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const uint32x4_t sum = vaddq_u32(w[i % 4], vld1q_u32(kSha256Rounds + 4 * i));
      if (i < 12)
        w[i % 4] = vsha256su1q_u32(vsha256su0q_u32(w[i % 4], w[(i + 1) % 4]), w[(i + 2) % 4], w[(i + 3) % 4]);
      const uint32x4_t before = abcd;
      abcd = vsha256hq_u32(abcd, efgh, sum);
      efgh = vsha256h2q_u32(efgh, before, sum);
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(state, abcd);
  vst1q_u32(state + 4, efgh);
}

}  // namespace kt::inline base
