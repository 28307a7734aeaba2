// As instantiate.cc, for attention: compiled once per ISA, apart because the products take minutes.
#include KT_ISA_HEADER

namespace KT_ISA_NAMESPACE {
namespace {
using Isa = KT_ISA_CLASS;
}
}  // namespace KT_ISA_NAMESPACE

#include "kernels/attend.inl.h"
