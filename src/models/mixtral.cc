// Mixtral: Llama's attention, softmax routing whose chosen weights sum to one.
#include "models/family.h"

namespace kt {

ModelSpec describe_mixtral(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-5);
  read_gqa(config, spec);
  read_rope(config, {.dims = spec.gqa.head_dim, .theta = 1e6}, spec);
  read_experts(config, {.experts = "num_local_experts", .inter = "intermediate_size"}, spec);
  spec.moe.router.normalise = true;
  spec.names.router = "block_sparse_moe.gate";
  if (config.has("sliding_window"))
    for (LayerSpec& layer : spec.layers) layer.window = config.integer("sliding_window");
  return spec;
}

}  // namespace kt
