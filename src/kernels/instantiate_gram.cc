// As instantiate.cc, for symmetric updates and products of f32.
#include "kernels/instantiate.h"

#include "kernels/gram.inl.h"
#include "kernels/lanes.inl.h"

namespace KT_ISA_NAMESPACE {

extern const kt::GramKernels kGram;
constexpr kt::GramKernels kGram = {kGramCode, gram_pack<Isa>, gram_add<Isa>, product_f32,
                                   add_lanes, round_lanes,    scale_error};

}  // namespace KT_ISA_NAMESPACE
