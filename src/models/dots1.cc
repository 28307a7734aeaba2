// dots.llm1: grouped-query attention with norms of each head, sigmoid routing with a correction bias, shared experts,
// first layers dense.
#include "models/family.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {

ModelSpec describe_dots1(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  refuse_moe_layer_freq(config);
  GqaSpec gqa = read_gqa(config, spec);
  gqa.qkv_bias = gqa.o_bias = config.boolean("attention_bias", false);
  gqa.norm = GqaSpec::Norm::kHead;
  gqa.rope = read_rope(config, {.dims = gqa.head_dim}, spec);
  MoeSpec moe = read_experts(config, {.experts = "n_routed_experts"});
  read_sigmoid_router(config, 1, moe);
  moe.router.normalise = config.boolean("norm_topk_prob", false);
  read_shared_experts(config, moe);
  fill_layers(config, gqa, moe, spec);
  if (read_layer_types(config, spec) || !config.has("sliding_window")) return spec;
  // All but the first max_window_layers.
  for (size_t i = static_cast<size_t>(config.integer("max_window_layers", 62)); i < spec.layers.size(); ++i)
    set_window(spec.layers[i], config.integer("sliding_window"));
  return spec;
}

namespace {

void complete_dots1(GgufFacts& facts) {
  facts.add_dense_layers(GgufFacts::DenseLayers::kCounted);
  facts.add_if_absent("norm_topk_prob", false);
  facts.add_if_absent("routed_scaling_factor", 1.0);
}

}  // namespace

constinit const GgufFamily kDots1Gguf = {
    .gguf = "dots1",
    .model_type = "dots1",
    .architecture = "Dots1ForCausalLM",
    .expert_count = "n_routed_experts",
    .complete = complete_dots1,
};

}  // namespace kt::inline models
