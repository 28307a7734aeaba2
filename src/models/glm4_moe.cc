// GLM-4.5 and 4.6: grouped-query attention of which half of a head is rotated, sigmoid routing with a correction
// bias, shared experts, first layers dense.
#include "models/family.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {

ModelSpec describe_glm4_moe(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-5);
  GqaSpec gqa = read_gqa(config, spec);
  gqa.qkv_bias = config.boolean("attention_bias", false);
  gqa.norm = config.boolean("use_qk_norm", false) ? GqaSpec::Norm::kHead : GqaSpec::Norm::kNone;
  gqa.rope = read_rope(config, {.dims = gqa.head_dim, .part = 0.5}, spec);
  MoeSpec moe = read_experts(config, {.experts = "n_routed_experts"});
  read_sigmoid_router(config, 1, moe);
  read_shared_experts(config, moe);
  fill_layers(config, gqa, moe, spec);
  return spec;
}

namespace {

constexpr GgufName kGlm4MoeNames[] = {{"post_attention_norm", "post_attention_layernorm"}};

void complete_glm4_moe(GgufFacts& facts) {
  facts.config()["use_qk_norm"] = facts.find("blk.0.attn_q_norm.weight") != nullptr;
  facts.add_dense_layers(GgufFacts::DenseLayers::kCounted);
  facts.add_if_absent("norm_topk_prob", false);
  facts.add_if_absent("routed_scaling_factor", 1.0);
}

}  // namespace

constinit const GgufFamily kGlm4MoeGguf = {
    .gguf = "glm4moe",
    .model_type = "glm4_moe",
    .architecture = "Glm4MoeForCausalLM",
    .names = kGlm4MoeNames,
    .expert_count = "n_routed_experts",
    .complete = complete_glm4_moe,
};

}  // namespace kt::inline models
