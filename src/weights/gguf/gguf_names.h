// The names of a model's tensors in GGUF files and in the checkpoint they were made from, both ways: the
// usual ones are a table here, a family's own come with it. Names only; what a conversion does to the numbers
// is linears.cc's affair.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "weights/checkpoint.h"
#include "weights/experts.h"
#include "weights/gguf/gguf_family.h"

namespace kt::inline weights {

// A null family has the usual names.
//
// "blk.3.attn_q.weight" for "model.layers.3.self_attn.q_proj.weight"; nothing for a name without a row.
std::optional<std::string> gguf_name(const GgufFamily* family, std::string_view published);
// The way back.
std::optional<std::string> published_name(const GgufFamily* family, std::string_view gguf);
// "model.layers.3.mlp.experts.7.gate_proj", or as the family spells it.
std::string published_expert(const GgufFamily* family, int layer, int expert, Projection projection);

}  // namespace kt::inline weights
