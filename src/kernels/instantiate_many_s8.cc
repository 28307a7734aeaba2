// As instantiate.cc, for the route many_s8.
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

constexpr Route kManyS8 = route([]<kt::Layout kL>() -> kt::Kernels::Multiply {
  if constexpr (kt::is_integer(kL.code) && Isa::kRoundedPanels) return many_s8<kL>;
  return nullptr;
});

}  // namespace KT_ISA_NAMESPACE
