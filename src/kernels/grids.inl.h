// Codes that are looked up several numbers at a time (formats/layout.h: how their indices and signs lie): a chunk as
// plain bytes in steps, which everything else then takes as it takes 8-bit codes. 1 KB, written once and read from L1.
//
// The indices of a step's rows -> words of the table, gathered -> 128 - code where a number is negative. A gather reads
// its words one by one, so where entries are of 8 bytes and a step of 4, x86 loads entries and takes two steps of them.
// With AVX-512 a grid of 256 entries is looked up in registers instead, 64 indices at a time: an entry's levels, 12 or
// 16 bits, and not its bytes (grids.h: GridTables), which is a quarter or half as much to permute; then each level with
// its sign in one more look-up (isa/avx512.h, isa/look_up_bytes.h).
#pragma once
#include "formats/grids.h"
#include "kernels/isa/inline.h"
#include "kernels/table.h"

namespace KT_ISA_NAMESPACE {
namespace {

using namespace kt;

template <Layout kL>
inline constexpr int kLookedUp =
    is_grid(kL.code) ? kBlockRows * kChunk : 1;  // bytes a chunk is looked up into

// Grids whose indices are bytes, where the ISA has tables of them.
template <Code kCode>
constexpr bool in_registers() {
  return Isa::kGridTables && grid_of(kCode).high_bits == 0;
}

// The indices of group kGroup of columns, of one part of the row block.
template <Code kCode, int kGroup>
KT_INLINE typename Isa::I32 index_of(const uint8_t* chunk, int part) {
  using I = typename Late<Isa, kGroup>::type;
  constexpr int kHighBits = grid_of(kCode).high_bits;
  const int row = part * I::kLanes;
  const auto low = I::template quarter<kGroup % 4>(chunk + grid_low(kGroup / 4 * 4, 0) + row * 4);
  if constexpr (kHighBits == 0) {
    return low;
  } else {
    constexpr BitPlace kHigh = grid_high(kCode, kGroup, 0);
    constexpr int kBits = kCode == Code::kIq1 ? 3 : kHighBits;  // the fourth is the eighth's sign
    return I::template with_high<kHigh.shift, kBits>(low, I::load_u8(chunk + kHigh.byte + row));
  }
}

// Steps [kT, kT + kSteps) of a chunk, for one part of the row block, without their signs.
template <Code kCode, int kT, int kSteps>
KT_INLINE void gather_steps(const uint8_t* table, const uint8_t* chunk, int part,
                            typename Isa::Bytes (&w)[kSteps]) {
  using I = typename Late<Isa, kT>::type;
  constexpr int kNumbers = grid_of(kCode).numbers, kFirst = kT * I::kStep % kNumbers,
                kGroup = kT * I::kStep / kNumbers, kSecond = kNumbers < I::kStep ? kGroup + 1 : kGroup;
  const auto index = index_of<kCode, kGroup>(chunk, part);
  if constexpr (kSteps == 2)
    I::gather_two(table, index, w);
  else
    w[0] = I::template gather<kNumbers>(table + kFirst, index, index_of<kCode, kSecond>(chunk, part));
  if constexpr (kCode == Code::kIq1) {
    constexpr BitPlace kHigh = grid_high(kCode, kGroup, 0);
    const auto high = I::load_u8(chunk + kHigh.byte + part * I::kLanes);
    for (auto& step : w) step = I::template one_off<kHigh.shift + 3>(step, high);
  }
}

// Puts step kT of one part where it belongs.
template <Code kCode, int kT>
KT_INLINE void put_step(typename Isa::Bytes w, const uint8_t* chunk, int part, uint8_t* to) {
  constexpr int kStepBytes = kBlockRows * Isa::kStep;
  if constexpr (grid_of(kCode).signs)
    w = Isa::template negate<kT % 8>(
        w, chunk + grid_planes(kCode).signs + kT / 8 * kStepBytes + part * Isa::kLanes * Isa::kStep);
  Isa::store_bytes(to + kT * kStepBytes + part * Isa::kLanes * Isa::kStep, w);
}

// The chunk's codes in the order of plain bytes (layout.h). Not inlined: one for all that multiplies or widens them.
template <Code kCode>
__attribute__((noinline)) void look_up_chunk(const uint8_t* chunk, uint8_t* to) {
  constexpr int kNumbers = grid_of(kCode).numbers;
  if constexpr (in_registers<kCode>()) {
    using I = typename Late<Isa, kCode>::type;
    const GridTables& tables = *grid_tables(kCode);
    const uint8_t* signs = chunk + grid_planes(kCode).signs;
    unroll<kChunk / kNumbers / 4>([&](auto four) __attribute__((always_inline)) {
      constexpr int kStepAt =
          decltype(four)::value * kNumbers;  // steps are of 4 columns, look-ups of 4 groups
      I::template look_up_four<kNumbers, kStepAt % 8 != 0>(tables, chunk + four * 64,
                                                           signs + kStepAt / 8 * 64, to + kStepAt * 64);
    });
  } else {
    const uint8_t* table = grid_codes(kCode);
    constexpr int kSteps = Isa::kGathersTwo && kNumbers == 2 * Isa::kStep ? 2 : 1;
    for (int part = 0; part < kBlockRows / Isa::kLanes; ++part)
      unroll<kChunk / Isa::kStep / kSteps>([&](auto t) __attribute__((always_inline)) {
        constexpr int kT = decltype(t)::value * kSteps;
        typename Isa::Bytes w[kSteps];
        gather_steps<kCode, kT, kSteps>(table, chunk, part, w);
        unroll<kSteps>([&](auto s) __attribute__((always_inline)) {
          put_step<kCode, kT + decltype(s)::value>(w[s], chunk, part, to);
        });
      });
  }
}

// Where the codes of a chunk can be read: as they lie, or looked up into `memory`.
template <Layout kL>
KT_INLINE const uint8_t* chunk_codes(const uint8_t* chunk, uint8_t (&memory)[kLookedUp<kL>]) {
  if constexpr (is_grid(kL.code)) {
    look_up_chunk<kL.code>(chunk, memory);
    return memory;
  } else {
    return chunk;
  }
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
