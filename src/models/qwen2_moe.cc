// Qwen1.5-MoE and Qwen2-MoE: biases of q, k and v, softmax routing, and one shared expert behind a gate of
// its own.
#include "models/family.h"

namespace kt {

ModelSpec describe_qwen2_moe(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  GqaSpec gqa = read_gqa(config, spec);
  gqa.qkv_bias = config.boolean("qkv_bias", true);
  gqa.rope = read_rope(config, {.dims = gqa.head_dim}, spec);
  MoeSpec moe = read_experts(config, {.experts = "num_experts"});
  moe.router.normalise = config.boolean("norm_topk_prob", false);
  moe.shared_inter = config.integer("shared_expert_intermediate_size");
  moe.shared_gate = true;
  moe.names.shared = "mlp.shared_expert";
  fill_layers(config, gqa, moe, spec);
  if (read_layer_types(config, spec) || !config.boolean("use_sliding_window", false)) return spec;
  // Every second one of the first max_window_layers.
  const size_t last = static_cast<size_t>(config.integer("max_window_layers", 28));
  for (size_t i = 0; i < spec.layers.size() && i < last; i += 2)
    set_window(spec.layers[i], config.integer("sliding_window", 4096, 1));
  return spec;
}

}  // namespace kt
