// As instantiate.cc, for the route many_f32.
#include KT_ISA_HEADER

namespace KT_ISA_NAMESPACE {
namespace {
using Isa = KT_ISA_CLASS;
}
}  // namespace KT_ISA_NAMESPACE

#pragma GCC diagnostic ignored "-Wunused-function"  // the kernels of the other routes
#include "kernels/many.inl.h"
#include "kernels/routes.inl.h"

namespace KT_ISA_NAMESPACE {

constexpr Route kManyF32 = route([]<kt::Layout kL>() -> kt::Kernels::Multiply { return many_f32<kL>; });

}  // namespace KT_ISA_NAMESPACE
