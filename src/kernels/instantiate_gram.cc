// As instantiate.cc, for symmetric updates and products of f32.
#include KT_ISA_HEADER

namespace KT_ISA_NAMESPACE {
namespace {
using Isa = KT_ISA_CLASS;
}
}  // namespace KT_ISA_NAMESPACE

#pragma GCC diagnostic ignored "-Wunused-function"  // the other kernels of rows.inl.h
#include "kernels/gram.inl.h"
#include "kernels/lanes.inl.h"

namespace KT_ISA_NAMESPACE {

extern const kt::GramKernels kGram;
constexpr kt::GramKernels kGram = {kGramCode, gram_pack<Isa>, gram_add<Isa>, product_f32,
                                   add_lanes, round_lanes,    scale_error};

}  // namespace KT_ISA_NAMESPACE
