// Qwen1.5-MoE and Qwen2-MoE: biases of q, k and v, softmax routing, and one shared expert behind a gate of
// its own.
#include "models/family.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {

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

namespace {

constexpr GgufName kQwen2MoeNames[] = {
    {"ffn_gate_shexp", "mlp.shared_expert.gate_proj"},
    {"ffn_up_shexp", "mlp.shared_expert.up_proj"},
    {"ffn_down_shexp", "mlp.shared_expert.down_proj"},
};

void complete_qwen2_moe(GgufFacts& facts) {
  Json& config = facts.config();
  config["qkv_bias"] = config["attention_bias"];
  config.erase("attention_bias");
  const Tensor* const shared = facts.in_any_layer("ffn_gate_shexp.weight");
  if (shared != nullptr && !shared->shape.empty())
    facts.add_if_absent("shared_expert_intermediate_size", static_cast<uint64_t>(shared->shape[0]));
  facts.add_dense_layers(GgufFacts::DenseLayers::kListed);
  facts.add_if_absent("norm_topk_prob", false);
}

}  // namespace

constinit const GgufFamily kQwen2MoeGguf = {
    .gguf = "qwen2moe",
    .model_type = "qwen2_moe",
    .architecture = "Qwen2MoeForCausalLM",
    .names = kQwen2MoeNames,
    .complete = complete_qwen2_moe,
};

}  // namespace kt::inline models
