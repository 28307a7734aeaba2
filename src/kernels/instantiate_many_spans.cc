// As instantiate.cc, for the route many_spans.
#include "kernels/instantiate.h"

#include "kernels/routes.inl.h"
#include "kernels/spans.inl.h"

namespace KT_ISA_NAMESPACE {

constexpr Route kManySpans = route([]<kt::Layout kL>() -> kt::Kernels::Multiply {
  if constexpr (kt::is_integer(kL.code) && !Isa::kTileUnit) return many_spans<kL>;
  return nullptr;
});

}  // namespace KT_ISA_NAMESPACE
