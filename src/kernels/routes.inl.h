// The kernels of one route for every layout. Each route has a translation unit of its own (instantiate_many_s8.cc and
// its neighbours), the route few two, because one for all of them takes a minute and more to compile.
#pragma once
#include <array>
#include <utility>

#include "kernels/table.h"

namespace KT_ISA_NAMESPACE {

using Route = std::array<kt::Kernels::Multiply, kt::kLayoutCount>;
extern const Route kFewLong, kFewShort, kManySpans, kManyS8, kManyBf16, kManyF32;

namespace {

// route(pick)[i] is what pick.operator()<kLayouts[i]>() returns.
template <class Pick, size_t... kI>
constexpr Route route(Pick pick, std::index_sequence<kI...>) {
  return { pick.template operator()<kt::kLayouts[kI]>()... };
}
template <class Pick>
constexpr Route route(Pick pick) {
  return route(pick, std::make_index_sequence<kt::kLayoutCount>());
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
