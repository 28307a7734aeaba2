// AMX: eight tile registers of 16 rows x 64 bytes. Inline assembly, because the compilers' intrinsics take tile
// numbers as literal text, not as template arguments, and do not say that tile loads and stores touch memory.
#pragma once
#include "kernels/isa/inline.h"

namespace KT_ISA_NAMESPACE {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);
constexpr TileConfig kTileConfig;

struct AmxUnit {
  static KT_INLINE void configure() { asm volatile("ldtilecfg %0" : : "m"(kTileConfig) : "memory"); }
  static KT_INLINE void release() { asm volatile("tilerelease" : : : "memory"); }

  template <int kTile> static KT_INLINE void zero() { asm volatile("tilezero %%tmm%c0" : : "i"(kTile)); }
  template <int kTile> static KT_INLINE void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(stride) : "memory");
  }
  template <int kTile> static KT_INLINE void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(to), "r"(stride) : "memory");
  }
  // C += A (signed) * B (unsigned)
  template <int kC, int kA, int kB> static KT_INLINE void dot_s8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
  template <int kC, int kA, int kB> static KT_INLINE void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
};

}  // namespace
}  // namespace KT_ISA_NAMESPACE
