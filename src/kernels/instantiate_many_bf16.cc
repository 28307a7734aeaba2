// As instantiate.cc, for the route many_bf16 and the panels it multiplies.
#include "kernels/instantiate.h"

#include "kernels/many.inl.h"
#include "kernels/routes.inl.h"
#include "kernels/widenings.inl.h"

namespace KT_ISA_NAMESPACE {

constexpr Route kManyBf16 = route([]<kt::Layout kL>() -> kt::Kernels::Multiply {
  if constexpr (Isa::kBf16Product) return many_bf16<kL>;
  return nullptr;
});

constexpr Widenings<uint8_t> kWidenBf16 = widenings<uint8_t>([]<kt::Layout kL>() -> Widen<uint8_t> {
  if constexpr (Isa::kBf16Product) return widen_bf16<kL>;
  return nullptr;
});

}  // namespace KT_ISA_NAMESPACE
