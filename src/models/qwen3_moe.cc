// Qwen3-MoE: grouped-query attention with norms of each head, softmax routing.
#include "models/family.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {

ModelSpec describe_qwen3_moe(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  GqaSpec gqa = read_gqa(config, spec);
  gqa.qkv_bias = gqa.o_bias = config.boolean("attention_bias", false);
  gqa.norm = GqaSpec::Norm::kHead;
  gqa.rope = read_rope(config, {.dims = gqa.head_dim}, spec);
  // All layers or none: max_window_layers means nothing in this family.
  if (config.boolean("use_sliding_window", false)) gqa.window = config.integer("sliding_window", 4096, 1);
  MoeSpec moe = read_experts(config, {.experts = "num_experts"});
  moe.router.normalise = config.boolean("norm_topk_prob", false);
  fill_layers(config, gqa, moe, spec);
  return spec;
}

namespace {

void complete_qwen3_moe(GgufFacts& facts) {
  facts.add_dense_layers(GgufFacts::DenseLayers::kListed);
  facts.add_if_absent("norm_topk_prob", true);
}

}  // namespace

constinit const GgufFamily kQwen3MoeGguf = {
    .gguf = "qwen3moe",
    .model_type = "qwen3_moe",
    .architecture = "Qwen3MoeForCausalLM",
    .complete = complete_qwen3_moe,
};

}  // namespace kt::inline models
