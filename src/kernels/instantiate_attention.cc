// As instantiate.cc, for attention: compiled once per ISA, apart because the products take minutes.
#include "kernels/instantiate.h"

#include "kernels/attention.inl.h"
#include "kernels/indexer.inl.h"

namespace KT_ISA_NAMESPACE {

extern const kt::AttentionKernels kAttention;
constexpr kt::AttentionKernels kAttention = {
    kNarrowRows, Isa::kTileUnit ? 256 : 128, attend, query, merge, join, keys_of_values, gather, index_scores,
    choose};

}  // namespace KT_ISA_NAMESPACE
