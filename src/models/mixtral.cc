// Mixtral: Llama's attention, softmax routing whose chosen weights sum to one.
#include "models/family.h"

namespace kt {

ModelSpec describe_mixtral(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-5);
  GqaSpec gqa = read_gqa(config, spec);
  gqa.rope = read_rope(config, {.dims = gqa.head_dim, .theta = 1e6}, spec);
  if (config.has("sliding_window")) gqa.window = config.integer("sliding_window");
  MoeSpec moe = read_experts(config, {.experts = "num_local_experts", .inter = "intermediate_size"});
  moe.router.normalise = true;
  moe.names.router = "block_sparse_moe.gate";
  fill_layers(config, gqa, moe, spec);
  return spec;
}

}  // namespace kt
