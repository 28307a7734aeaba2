// 64 indices of a grid of 256 entries as numbers with their signs, where bytes of several registers can be permuted
// (VBMI). An entry's levels are two bytes, each looked up in four registers of 64: the indices' top bits say which
// quarter a permute may write. A multishift then gives every byte of a step a window that has its level at one end;
// signs fill the other end, and the window's low six bits look up what both stand for. Of 8 numbers to an index the two
// bytes are those of two steps; of 4 they stand side by side in 16 bits first.
//
// The operations are those of V: the instructions of that name, or plain loops, which is how the test runs this.
#pragma once
#include "formats/grids.h"
#include "kernels/isa/inline.h"

namespace KT_ISA_NAMESPACE {
namespace {

// Constants of 64 bytes. order: of the indices (layout.h: grid_low) before they are looked up, two rows by four groups
// in 8 bytes, of 4 numbers two groups of four rows. window: where the bits of each byte of a step begin in its 8 bytes,
// for group kGroup of 4 rows whose levels shall stand at bit kLevel.
template <int kNumbers>
struct LookUpOrder {
  alignas(64) uint8_t at[64];
  constexpr LookUpOrder() : at() {
    for (int lane = 0; lane < 4; ++lane)
      for (int group = 0; group < 4; ++group)
        for (int row = 0; row < 4; ++row) {
          const int to = kNumbers == 8 ? row / 2 * 8 + group * 2 : group / 2 * 8 + row / 2 * 4 + group % 2 * 2;
          at[lane * 16 + to + row % 2] = static_cast<uint8_t>(group * 4 + row);
        }
  }
};
template <int kNumbers, int kGroup, int kLevel>
struct LookUpWindow {
  alignas(64) uint8_t at[64];
  constexpr LookUpWindow() : at() {
    for (int i = 0; i < 64; ++i) {
      const int row = i % 8 / 4, column = i % 4;
      const int entry = kNumbers == 8 ? (2 * kGroup + row) * 8 : (kGroup % 2 * 2 + row) * 16;
      at[i] = static_cast<uint8_t>((entry + kt::GridBytes{kNumbers}.place(column) - kLevel) & 63);
    }
  }
};
template <int kNumbers>
inline constexpr LookUpOrder<kNumbers> kLookUpOrder;
template <int kNumbers, int kGroup, int kLevel>
inline constexpr LookUpWindow<kNumbers, kGroup, kLevel> kLookUpWindow;

// Avx512::look_up_four says what comes in and what goes out.
template <class V, int kNumbers, bool kOdd>
KT_INLINE void look_up_bytes(const kt::GridTables& t, const uint8_t* index, const uint8_t* signs, uint8_t* to) {
  using R = typename V::R;
  constexpr kt::GridBytes kBytes{kNumbers};
  const R i = V::shuffle(V::load(index), V::load(kLookUpOrder<kNumbers>.at));
  const auto bit7 = V::tops(i), bit6 = V::tops(V::twice(i)), both = V::both(bit6, bit7);
  R half[2];
  unroll<2>([&](auto h) __attribute__((always_inline)) {
    const uint8_t* table = t.halves[h];
    R x = V::permute(V::load(table), i);
    x = V::permute_some(x, bit6, V::load(table + 64), i);
    x = V::permute_some(x, bit7, V::load(table + 128), i);
    half[h] = V::permute_some(x, both, V::load(table + 192), i);
  });
  if constexpr (kNumbers == 4) {
    const R low = half[0];
    half[0] = V::zip_low(low, half[1]);
    half[1] = V::zip_high(low, half[1]);
  }
  const R less = V::load(signs);
  unroll<kNumbers>([&](auto step) __attribute__((always_inline)) {
    constexpr int kStepAt = decltype(step)::value, kGroup = kStepAt * 4 / kNumbers;
    constexpr int kHalf = kNumbers == 8 ? kStepAt % 2 : kStepAt / 2, kLevel = kBytes.level(kStepAt);
    const R levels = V::windows(half[kHalf], V::load(kLookUpWindow<kNumbers, kGroup, kLevel>.at));
    const R sign = kOdd || kStepAt >= 4 ? V::sixteenth(less) : less;
    const R place = V::template choose<((1 << kBytes.bits()) - 1) << kLevel>(levels, sign);
    V::store(to + kStepAt * 64, V::permute(V::load(t.by_byte[kStepAt % 4]), place));
  });
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
