// What GGUF files of families with indexers have in common.
#pragma once
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {

inline constexpr GgufName kIndexedGgufNames[] = {
    {"indexer.attn_q_b.weight", "self_attn.indexer.wq_b.weight"},
    {"indexer.attn_k.weight", "self_attn.indexer.wk.weight"},
    {"indexer.k_norm.weight", "self_attn.indexer.k_norm.weight"},
    {"indexer.k_norm.bias", "self_attn.indexer.k_norm.bias"},
    {"indexer.proj.weight", "self_attn.indexer.weights_proj.weight"},
};

// What only tensors tell.
void complete_indexed(GgufFacts& facts);

}  // namespace kt::inline models
