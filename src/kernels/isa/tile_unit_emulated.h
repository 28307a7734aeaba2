// The tile unit in plain C++, for tests of the tile loops on CPUs that have none. As strict as the hardware: tiles
// may only be used between configure and release, on the thread that called them.
#pragma once
#include "kernels/isa/inline.h"

namespace KT_ISA_NAMESPACE {
namespace {

thread_local bool tiles_configured = false;

struct EmulatedUnit {
  uint8_t tile[8][16][64];

  // Calls, not inlined loops, as in portable.h.
  static KT_INLINE void need(bool state) {
    if (tiles_configured != state) __builtin_trap();
  }
  static KT_INLINE void configure() { need(false); tiles_configured = true; }
  static KT_INLINE void release() { need(true); tiles_configured = false; }

  template <int kTile> __attribute__((noinline)) void zero() {
    need(true);
    std::memset(tile[kTile], 0, sizeof tile[kTile]);
  }
  template <int kTile> __attribute__((noinline)) void load(const void* from, int64_t stride) {
    need(true);
    for (int r = 0; r < 16; ++r) std::memcpy(tile[kTile][r], static_cast<const uint8_t*>(from) + r * stride, 64);
  }
  template <int kTile> __attribute__((noinline)) void store(void* to, int64_t stride) {
    need(true);
    for (int r = 0; r < 16; ++r) std::memcpy(static_cast<uint8_t*>(to) + r * stride, tile[kTile][r], 64);
  }
  template <int kC, int kA, int kB> __attribute__((noinline)) void dot_s8() {
    need(true);
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 16; ++n) {
        int32_t sum;
        std::memcpy(&sum, tile[kC][m] + 4 * n, 4);
        for (int k = 0; k < 64; ++k) sum += static_cast<int8_t>(tile[kA][m][k]) * int{tile[kB][k / 4][4 * n + k % 4]};
        std::memcpy(tile[kC][m] + 4 * n, &sum, 4);
      }
  }
  template <int kC, int kA, int kB> __attribute__((noinline)) void dot_bf16() {
    need(true);
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 16; ++n) {
        float sum, part[2] = {};  // of even and odd columns, joined at the end, as the hardware does
        std::memcpy(&sum, tile[kC][m] + 4 * n, 4);
        for (int k = 0; k < 32; ++k) {
          const float a = float_of(uint32_t{u16_at(tile[kA][m] + 2 * k)} << 16);
          const float b = float_of(uint32_t{u16_at(tile[kB][k / 2] + 4 * n + k % 2 * 2)} << 16);
          part[k % 2] += a * b;
        }
        sum += part[0] + part[1];
        std::memcpy(tile[kC][m] + 4 * n, &sum, 4);
      }
  }
};

}  // namespace
}  // namespace KT_ISA_NAMESPACE
