// Qwen3-MoE: grouped-query attention with norms of each head, softmax routing.
#include "models/family.h"

namespace kt {

ModelSpec describe_qwen3_moe(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  read_gqa(config, spec);
  spec.gqa.qkv_bias = spec.gqa.o_bias = config.boolean("attention_bias", false);
  spec.gqa.norm = GqaSpec::Norm::kHead;
  read_rope(config, {.dims = spec.gqa.head_dim}, spec);
  read_experts(config, {.experts = "num_experts"}, spec);
  spec.moe.router.normalise = config.boolean("norm_topk_prob", false);
  // All layers or none: max_window_layers means nothing in this family.
  if (config.boolean("use_sliding_window", false))
    for (LayerSpec& layer : spec.layers) layer.window = config.integer("sliding_window", 4096, 1);
  return spec;
}

}  // namespace kt
