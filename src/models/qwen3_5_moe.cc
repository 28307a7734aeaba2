// Qwen3.5 and Qwen3.6 with experts: as Qwen3-Next with projections apart, experts in every layer, and weights of the
// chosen always divided by their sum. Images are not read; where there is text alone, the three positions of a token
// are one.
#include "models/delta_gguf.h"
#include "models/family.h"

namespace kt::inline models {

ModelSpec describe_qwen3_5_moe(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  require_flag(config, "norm_topk_prob", true);
  MoeSpec moe = read_experts(config, {.experts = "num_experts"});
  moe.router.normalise = true;
  moe.shared_inter = config.integer("shared_expert_intermediate_size");
  moe.shared_gate = true;
  moe.names.shared = "mlp.shared_expert";
  for (LayerSpec& layer : spec.layers) layer.feed_forward = moe;
  read_delta_layers(config, {}, spec);
  return spec;
}

constinit const GgufFamily kQwen35MoeGguf = {
    .gguf = "qwen35moe",
    .model_type = "qwen3_5_moe_text",
    .architecture = "Qwen3_5MoeForCausalLM",
    .names = kDeltaGgufNames,
    .complete = complete_delta,
};

}  // namespace kt::inline models
