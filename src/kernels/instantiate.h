// What every instantiate*.cc begins with: the instruction set that isa.cmake names (KT_ISA_HEADER, KT_ISA_CLASS,
// KT_ISA_NAMESPACE and the flags) as `Isa`.
#pragma once
#include KT_ISA_HEADER

namespace KT_ISA_NAMESPACE {
namespace {
using Isa = KT_ISA_CLASS;
}
}  // namespace KT_ISA_NAMESPACE

#pragma GCC diagnostic ignored "-Wunused-function"  // each instantiates some of the kernels
