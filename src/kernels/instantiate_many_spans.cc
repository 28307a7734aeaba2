// As instantiate.cc, for the route many_spans.
#include KT_ISA_HEADER

namespace KT_ISA_NAMESPACE {
namespace {
using Isa = KT_ISA_CLASS;
}
}  // namespace KT_ISA_NAMESPACE

#pragma GCC diagnostic ignored "-Wunused-function"  // the kernels of the other routes
#include "kernels/routes.inl.h"
#include "kernels/spans.inl.h"

namespace KT_ISA_NAMESPACE {

constexpr Route kManySpans = route([]<kt::Layout kL>() -> kt::Kernels::Multiply {
  if constexpr (kt::is_integer(kL.code) && !Isa::kTileUnit) return many_spans<kL>;
  return nullptr;
});

}  // namespace KT_ISA_NAMESPACE
