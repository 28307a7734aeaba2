// As instantiate.cc, for the route many_s8.
#include "kernels/instantiate.h"

#include "kernels/many.inl.h"
#include "kernels/routes.inl.h"

namespace KT_ISA_NAMESPACE {

constexpr Route kManyS8 = route([]<kt::Layout kL>() -> kt::Kernels::Multiply {
  if constexpr (kt::is_integer(kL.code) && Isa::kRoundedPanels) return many_s8<kL>;
  return nullptr;
});

}  // namespace KT_ISA_NAMESPACE
