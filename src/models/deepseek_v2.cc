// DeepSeek-V2 and V2-Lite: latent attention (without a rank for q in Lite), softmax routing, in the large one
// within the groups whose best expert is best.
#include "models/family.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {

ModelSpec describe_deepseek_v2(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  refuse_moe_layer_freq(config);
  refuse_mlp_bias(config);
  refuse_query_growth(config);
  MlaSpec mla = read_mla(config);
  mla.rope = read_rope(config, {.dims = mla.rotated}, spec);
  mla.rope.interleaved = true;
  scale_softmax_for_rope(config, mla);
  MoeSpec moe = read_experts(config, {.experts = "n_routed_experts"});
  read_shared_experts(config, moe);
  if (config.string("scoring_func", "softmax") != "softmax") config.unsupported("scoring_func", "softmax");
  // The published code divides by the sum and then does not scale, transformers does neither; no model asks.
  if (config.boolean("norm_topk_prob", false)) config.unsupported("norm_topk_prob", "false");
  RouterSpec& router = moe.router;
  router.scale = config.number("routed_scaling_factor", 1);
  const std::string method = config.string("topk_method", "greedy");
  if (method == "group_limited_greedy") {
    read_groups(config, moe);
    router.group_score = RouterSpec::GroupScore::kMax;
  } else if (method != "greedy") {
    config.unsupported("topk_method", "greedy, group_limited_greedy");
  }
  fill_layers(config, mla, moe, spec);
  return spec;
}

namespace {

void complete_deepseek_v2(GgufFacts& facts) {
  facts.add_dense_layers(GgufFacts::DenseLayers::kCounted);
  facts.add_if_absent("norm_topk_prob", false);
  facts.add_if_absent("routed_scaling_factor", 1.0);
  facts.config()["topk_method"] = facts.known("n_group") > 1 ? "group_limited_greedy" : "greedy";
}

}  // namespace

constinit const GgufFamily kDeepseekV2Gguf = {
    .gguf = "deepseek2",
    .model_type = "deepseek_v2",
    .architecture = "DeepseekV2ForCausalLM",
    .owns = [](const GgufHeader& header,
               const TensorFinder& find) { return !scores_by_sigmoid(header, find); },
    .expert_count = "n_routed_experts",
    .complete = complete_deepseek_v2,
};

}  // namespace kt::inline models
