// gpt-oss: biases everywhere, attention sinks, every second layer sees a window, the softmax is over the
// chosen experts only, and SwiGLU is clamped.
#include "models/family.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {
namespace {

// What a config without a word about positions means.
RopeSpec default_rope(int dims) {
  return {.dims = dims,
          .theta = 150000,
          .scaling = RopeSpec::Scaling::kYarn,
          .factor = 32,
          .original_context = 4096,
          .truncate = false,
          .attention_factor = 1.3465735902799727};  // 0.1 ln(32) + 1
}

}  // namespace

ModelSpec describe_gpt_oss(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-5);
  GqaSpec gqa = read_gqa(config, spec, 64);
  gqa.qkv_bias = gqa.o_bias = config.boolean("attention_bias", true);
  gqa.sinks = true;
  if (config.has("rope_parameters") || config.has("rope_scaling")) {
    gqa.rope = read_rope(config, {.dims = gqa.head_dim, .theta = 150000}, spec);
  } else {
    gqa.rope = default_rope(gqa.head_dim);
    gqa.rope.theta = config.number("rope_theta", gqa.rope.theta);
  }
  MoeSpec moe = read_experts(config, {.experts = "num_local_experts", .inter = "intermediate_size"});
  moe.router.score_of_chosen = true;
  moe.router.bias = true;
  moe.activation = {.kind = ActivationKind::kSwiGlu,
                    .limit = static_cast<float>(config.number("swiglu_limit", 7)),
                    .alpha = static_cast<float>(config.number("swiglu_alpha", 1.702))};
  moe.names.router = "mlp.router";
  fill_layers(config, gqa, moe, spec);
  if (!read_layer_types(config, spec))
    for (size_t i = 0; i < spec.layers.size(); i += 2)
      set_window(spec.layers[i], config.integer("sliding_window", 128, 1));
  return spec;
}

namespace {

constexpr GgufName kGptOssNames[] = {{"post_attention_norm", "post_attention_layernorm"},
                                     {"ffn_gate_inp", "mlp.router"}};

void complete_gpt_oss(GgufFacts& facts) {
  Json& config = facts.config();
  // Where config.json is silent about positions, it means what default_rope says.
  facts.add_if_absent("rope_scaling", Json{{"rope_type", "default"}});
  if (config["rope_scaling"].value("rope_type", "") == "yarn") config["rope_scaling"]["truncate"] = false;
  facts.rename_expert_size();
  facts.add_dense_layers(GgufFacts::DenseLayers::kUnsaid);
}

}  // namespace

constinit const GgufFamily kGptOssGguf = {
    .gguf = "gpt-oss",
    .model_type = "gpt_oss",
    .architecture = "GptOssForCausalLM",
    .names = kGptOssNames,
    .expert_count = "num_local_experts",
    .complete = complete_gpt_oss,
};

}  // namespace kt::inline models
