// What makes float panels of a row block, for every layout: compiled once, with the products that multiply the panels
// (instantiate_many_f32.cc, instantiate_many_bf16.cc), and used by whoever makes other panels of the same numbers.
#pragma once
#include <array>
#include <utility>

#include "kernels/table.h"

namespace KT_ISA_NAMESPACE {

// Columns [k0, k1) of a row block, multiples of kChunk, in the packed order of plain codes (panel.inl.h).
template <class Number>
using Widen = void (*)(const kt::Packing&, const uint8_t* block, int k0, int k1, Number* panel);
template <class Number>
using Widenings = std::array<Widen<Number>, kt::kLayoutCount>;
extern const Widenings<float> kWidenF32;
extern const Widenings<uint8_t> kWidenBf16;  // null where the ISA has no bf16 product

namespace {

// widenings<Number>(pick)[i] is what pick.operator()<kLayouts[i]>() returns.
template <class Number, class Pick>
constexpr Widenings<Number> widenings(Pick pick) {
  return [&]<size_t... kI>(std::index_sequence<kI...>) {
    return Widenings<Number> { pick.template operator()<kt::kLayouts[kI]>()... };
  }(std::make_index_sequence<kt::kLayoutCount>());
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
