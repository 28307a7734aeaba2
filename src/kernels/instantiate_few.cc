// As instantiate.cc, for the route few.
#include KT_ISA_HEADER

namespace KT_ISA_NAMESPACE {
namespace {
using Isa = KT_ISA_CLASS;
}
}  // namespace KT_ISA_NAMESPACE

#pragma GCC diagnostic ignored "-Wunused-function"  // the kernels of the other routes
#include "kernels/few.inl.h"
#include "kernels/routes.inl.h"

namespace KT_ISA_NAMESPACE {

constexpr Route kFew = route([]<kt::Layout kL>() -> kt::Kernels::Multiply { return few<kL>; });

}  // namespace KT_ISA_NAMESPACE
