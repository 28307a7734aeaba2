// As instantiate.cc, for the route many_bf16.
#include "kernels/instantiate.h"

#include "kernels/many.inl.h"
#include "kernels/routes.inl.h"

namespace KT_ISA_NAMESPACE {

constexpr Route kManyBf16 = route([]<kt::Layout kL>() -> kt::Kernels::Multiply {
  if constexpr (Isa::kBf16Product) return many_bf16<kL>;
  return nullptr;
});

}  // namespace KT_ISA_NAMESPACE
