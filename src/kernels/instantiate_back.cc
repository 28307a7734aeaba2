// As instantiate.cc, for backward passes.
#include "kernels/instantiate.h"

#include "kernels/activate_back.inl.h"
#include "kernels/outer_sum.inl.h"
#include "kernels/pack_panel.inl.h"
#include "kernels/transpose.inl.h"

namespace KT_ISA_NAMESPACE {

extern const kt::BackKernels kBack;
constexpr kt::BackKernels kBack = {Isa::kBf16Product ? transpose_bf16<Isa> : nullptr, transpose_f32,
                                   Isa::kBf16Product ? pack_panel<Isa> : nullptr, outer_sum, activate_back};

}  // namespace KT_ISA_NAMESPACE
