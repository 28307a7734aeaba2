// Codes that are looked up several numbers at a time (formats/layout.h: how their indices and signs lie): a chunk as
// plain bytes in steps, which everything else then takes as it takes 8-bit codes. 1 KB, written once and read from L1.
//
// The indices of a step's rows -> words of the table, gathered -> 128 - code where a number is negative. A gather reads
// its 16 words one by one. Where vpermi2b is there and a grid has 256 entries, 64 indices at a time go through a table
// of 256 bytes for each number of an entry instead: two look-ups of 128 bytes and a choice by the index's top bit, then
// two rounds of interleaving within 16 bytes.
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

// Grids whose indices are bytes, where the ISA looks up bytes.
template <Code kCode>
constexpr bool by_columns() {
  return Isa::kByteTables && grid_of(kCode).high_bits == 0;
}

// Step kT of a chunk, for one part of the row block, without its signs.
template <Code kCode, int kT>
KT_INLINE typename Isa::Bytes gather_step(const uint8_t* table, const uint8_t* chunk, int part) {
  using I = typename Late<Isa, kT>::type;
  constexpr Grid kGrid = grid_of(kCode);
  constexpr int kNumbers = kGrid.numbers, kFirst = kT * I::kStep % kNumbers,
                kGroup = kT * I::kStep / kNumbers, kSecond = kNumbers < I::kStep ? kGroup + 1 : kGroup;
  const int row = part * I::kLanes;
  const auto index = [&](auto group) __attribute__((always_inline)) {
    constexpr int kAt = decltype(group)::value;
    const auto low = I::template quarter<kAt % 4>(chunk + grid_low(kAt / 4 * 4, 0) + row * 4);
    if constexpr (kGrid.high_bits == 0) {
      return low;
    } else {
      constexpr BitPlace kHigh = grid_high(kCode, kAt, 0);
      constexpr int kBits = kCode == Code::kIq1 ? 3 : kGrid.high_bits;  // the fourth is the eighth's sign
      return I::template with_high<kHigh.shift, kBits>(low, I::load_u8(chunk + kHigh.byte + row));
    }
  };
  auto w = I::template gather<kNumbers>(table + kFirst, index(Int<kGroup>{}), index(Int<kSecond>{}));
  if constexpr (kCode == Code::kIq1) {
    constexpr BitPlace kHigh = grid_high(kCode, kGroup, 0);
    w = I::template one_off<kHigh.shift + 3>(w, I::load_u8(chunk + kHigh.byte + row));
  }
  return w;
}

// Puts step kT of one part where it belongs.
template <Code kCode, int kT>
KT_INLINE void put_step(typename Isa::Bytes w, const uint8_t* chunk, int part, uint8_t* to) {
  constexpr int kStepBytes = kBlockRows * Isa::kStep;
  if constexpr (grid_of(kCode).signs)
    w = Isa::negate(
        w, chunk + grid_planes(kCode).signs + kT * kStepBytes / 8 + part * Isa::kLanes * Isa::kStep / 8);
  Isa::store_bytes(to + kT * kStepBytes + part * Isa::kLanes * Isa::kStep, w);
}

// The chunk's codes in the order of plain bytes (layout.h). Not inlined: one for all that multiplies or widens them.
template <Code kCode>
__attribute__((noinline)) void look_up_chunk(const uint8_t* chunk, uint8_t* to) {
  constexpr int kNumbers = grid_of(kCode).numbers;
  if constexpr (by_columns<kCode>()) {
    using I = typename Late<Isa, kCode>::type;
    const uint8_t* columns = grid_columns(kCode);
    unroll<kChunk / kNumbers / 4>([&](auto four) __attribute__((always_inline)) {
      constexpr int kFirst = decltype(four)::value * kNumbers;  // steps are of 4 columns
      unroll<kNumbers / 4>([&](auto half) __attribute__((always_inline)) {
        typename I::Bytes steps[4];
        I::look_up_columns(columns + half * 4 * 256, I::load_bytes(chunk + four * 64), steps);
        unroll<4>([&](auto i) __attribute__((always_inline)) {
          constexpr int kT = kFirst + decltype(i)::value * (kNumbers / 4) + decltype(half)::value;
          put_step<kCode, kT>(steps[i], chunk, 0, to);
        });
      });
    });
  } else {
    const uint8_t* table = grid_codes(kCode);
    for (int part = 0; part < kBlockRows / Isa::kLanes; ++part)
      unroll<kChunk / Isa::kStep>([&](auto t) __attribute__((always_inline)) {
        constexpr int kT = decltype(t)::value;
        put_step<kCode, kT>(gather_step<kCode, kT>(table, chunk, part), chunk, part, to);
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
