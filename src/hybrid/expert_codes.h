// Stored experts in memory as a source of experts: codes and scales are read where they lie, nothing is
// rounded.
#pragma once
#include <memory>

#include "hybrid/expert_layer.h"
#include "weights/experts.h"

namespace kt::inline hybrid {

// The one layer of the options, whose experts are `codes` as checkpoints of `method` store them:
//
//   BF16            bf16 [n, k]
//   FP8             e4m3 [n, k]                        f32 [ceil(n / 128), ceil(k / 128)]
//   FP8_PERCHANNEL  e4m3 [n, k]                        f32 [n]
//   RAWINT4         nibbles [n, k / 2], code - 8       bf16 [n, k / group_size]
//   GPTQ_INT4       words [k / 8, n], code - 8         f32 [k / group_size, n]
//   MXFP4           nibbles [n, k / 2]                 bf16 [n, k / 32]
//   MXFP8           e4m3 [n, k]                        exponents [n, k / 32]
//   LLAMAFILE       blocks of gguf_type
//
// The low nibble and the low bits of a word are the lower column. Error for another method, for lists of
// another length than there are experts, null addresses and sizes that the packing cannot hold. What the
// addresses point to must outlive the source.
std::unique_ptr<ExpertSource> source_of_codes(const ExpertCodes& codes, const ExpertLayerOptions& options,
                                              const WeightMethod& method);

}  // namespace kt::inline hybrid
