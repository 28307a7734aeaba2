// As instantiate.cc, for the work on single rows.
#include "kernels/instantiate.h"

#include "kernels/recurrent.inl.h"
#include "kernels/row_ops.inl.h"

namespace KT_ISA_NAMESPACE {

extern const kt::RowKernels kRowOps;
constexpr kt::RowKernels kRowOps = {norm, rotate,   softmax,  sigmoid_row, write_cache,
                                    dot,  gate_row, convolve, delta_rule,  layer_norm};

}  // namespace KT_ISA_NAMESPACE
