// As instantiate.cc, for the route many_f32 and the panels it multiplies.
#include "kernels/instantiate.h"

#include "kernels/many.inl.h"
#include "kernels/routes.inl.h"
#include "kernels/widenings.inl.h"

namespace KT_ISA_NAMESPACE {

constexpr Route kManyF32 = route([]<kt::Layout kL>() -> kt::Kernels::Multiply { return many_f32<kL>; });

constexpr Widenings<float> kWidenF32 =
    widenings<float>([]<kt::Layout kL>() -> Widen<float> { return widen_f32<kL>; });

}  // namespace KT_ISA_NAMESPACE
