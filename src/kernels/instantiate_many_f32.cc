// As instantiate.cc, for the route many_f32.
#include "kernels/instantiate.h"

#include "kernels/many.inl.h"
#include "kernels/routes.inl.h"

namespace KT_ISA_NAMESPACE {

constexpr Route kManyF32 = route([]<kt::Layout kL>() -> kt::Kernels::Multiply { return many_f32<kL>; });

}  // namespace KT_ISA_NAMESPACE
