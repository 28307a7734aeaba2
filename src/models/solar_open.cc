// Solar-Open: Llama's attention, sigmoid routing with a correction bias, shared experts, experts in all layers. Its
// GGUF files are glm4moe.
#include "models/family.h"

namespace kt::inline models {

ModelSpec describe_solar_open(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-5);
  require_flag(config, "use_qk_norm", false);
  if (config.integer("first_k_dense_replace", 0) != 0) config.unsupported("first_k_dense_replace", "0");
  GqaSpec gqa = read_gqa(config, spec, 128);
  gqa.qkv_bias = config.boolean("attention_bias", false);
  gqa.rope = read_rope(config, {.dims = gqa.head_dim, .theta = 1e6}, spec);
  MoeSpec moe = read_experts(config, {.experts = "n_routed_experts"});
  read_sigmoid_router(config, 1, moe);
  read_shared_experts(config, moe);
  fill_layers(config, gqa, moe, spec);
  return spec;
}

}  // namespace kt::inline models
