// GLM-4.5 and 4.6: grouped-query attention of which half of a head turns, sigmoid routing with a correction
// bias, shared experts, first layers dense.
#include "models/family.h"

namespace kt {

ModelSpec describe_glm4_moe(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-5);
  read_gqa(config, spec);
  spec.gqa.qkv_bias = config.boolean("attention_bias", false);
  spec.gqa.norm = config.boolean("use_qk_norm", false) ? GqaSpec::Norm::kHead : GqaSpec::Norm::kNone;
  read_rope(config, {.dims = spec.gqa.head_dim, .part = 0.5}, spec);
  read_experts(config, {.experts = "n_routed_experts"}, spec);
  read_sigmoid_router(config, 1, spec);
  read_shared_experts(config, spec);
  return spec;
}

}  // namespace kt
