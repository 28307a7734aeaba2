// As instantiate.cc, for the route few of layouts with long spans.
#include "kernels/instantiate.h"

#include "kernels/few.inl.h"
#include "kernels/routes.inl.h"

namespace KT_ISA_NAMESPACE {

constexpr Route kFewLong = route([]<kt::Layout kL>() -> kt::Kernels::Multiply {
  if constexpr (kL.span == kt::SpanLength::kLong) return few<kL>;
  return nullptr;
});

}  // namespace KT_ISA_NAMESPACE
