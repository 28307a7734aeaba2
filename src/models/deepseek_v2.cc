// DeepSeek-V2 and V2-Lite: latent attention (without a rank for q in Lite), softmax routing, in the large one
// within the groups whose best expert is best.
#include "models/family.h"

namespace kt {

ModelSpec describe_deepseek_v2(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  refuse_mlp_bias(config);
  read_mla(config, spec);
  read_rope(config, {.dims = spec.mla.rope}, spec);
  spec.rope.interleaved = true;
  scale_softmax_for_rope(config, spec);
  read_experts(config, {.experts = "n_routed_experts"}, spec);
  read_shared_experts(config, spec);
  if (config.string("scoring_func", "softmax") != "softmax") config.unsupported("scoring_func", "softmax");
  // The published code divides by the sum and then does not scale, transformers does neither; no model asks.
  if (config.boolean("norm_topk_prob", false)) config.unsupported("norm_topk_prob", "false");
  RouterSpec& router = spec.moe.router;
  router.scale = config.number("routed_scaling_factor", 1);
  const std::string method = config.string("topk_method", "greedy");
  if (method == "group_limited_greedy") {
    read_groups(config, spec);
    router.group_score = RouterSpec::GroupScore::kMax;
  } else if (method != "greedy") {
    config.unsupported("topk_method", "greedy, group_limited_greedy");
  }
  return spec;
}

}  // namespace kt
