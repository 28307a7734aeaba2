// As instantiate.cc, for attention: compiled once per ISA, apart because the products take minutes.
#include KT_ISA_HEADER

namespace KT_ISA_NAMESPACE {
namespace {
using Isa = KT_ISA_CLASS;
}
}  // namespace KT_ISA_NAMESPACE

#include "kernels/attention.inl.h"

namespace KT_ISA_NAMESPACE {

extern const kt::AttentionKernels kAttention;
constexpr kt::AttentionKernels kAttention = {attend, query, join, keys_of_values};

}  // namespace KT_ISA_NAMESPACE
