// Hy3: grouped-query attention with norms of each head, sigmoid routing with a correction bias and no groups, shared
// experts, the first layer dense.
#include "models/family.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {

ModelSpec describe_hy_v3(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-5);
  refuse_mlp_bias(config);
  require_dense_layers(config);
  require_flag(config, "qk_norm", true);
  GqaSpec gqa = read_gqa(config, spec, 128);
  gqa.qkv_bias = gqa.o_bias = config.boolean("attention_bias", false);
  gqa.norm = GqaSpec::Norm::kHead;
  gqa.rope = read_rope(config, {.dims = gqa.head_dim, .theta = 11158840}, spec);
  const bool newer = config.has("moe_intermediate_size");
  MoeSpec moe = read_experts(
      config, {.experts = "num_experts", .inter = newer ? "moe_intermediate_size" : "expert_hidden_dim"});
  for (const std::string_view key :
       {"moe_router_use_sigmoid", "moe_router_enable_expert_bias", "route_norm", "norm_topk_prob"})
    require_flag(config, key, true);
  require_word(config, "scoring_func", "sigmoid");
  moe.router = {.score = RouterSpec::Score::kSigmoid,
                .normalise = true,
                .normalise_floor = 1e-20,
                .scale = config.number("router_scaling_factor", 2.826),
                .correction_bias = true};
  read_shared_experts(config, moe, "num_shared_experts");
  moe.names.router = "mlp.router.gate";
  moe.names.correction_bias = "mlp.expert_bias";
  moe.names.shared = "mlp.shared_mlp";
  fill_layers(config, gqa, moe, spec);
  return spec;
}

namespace {

constexpr GgufName kHyV3Names[] = {
    {"ffn_gate_inp", "mlp.router.gate"},
    {"exp_probs_b", "mlp.expert_bias", GgufName::Kind::kTensor},
    {"ffn_gate_shexp", "mlp.shared_mlp.gate_proj"},
    {"ffn_up_shexp", "mlp.shared_mlp.up_proj"},
    {"ffn_down_shexp", "mlp.shared_mlp.down_proj"},
};

void complete_hy_v3(GgufFacts& facts) {
  Json& config = facts.config();
  facts.add_dense_layers(GgufFacts::DenseLayers::kCounted);
  config["router_scaling_factor"] = config.value("routed_scaling_factor", Json(1.0));
  facts.add_if_absent("norm_topk_prob", false);
  // Files give the rows of all shared experts together.
  const Tensor* const shared = facts.in_any_layer("ffn_gate_shexp.weight");
  const uint64_t inter = facts.known("moe_intermediate_size");
  const bool counted = shared != nullptr && !shared->shape.empty() && inter > 0;
  config["num_shared_experts"] = counted ? static_cast<uint64_t>(shared->shape[0]) / inter : 0;
}

}  // namespace

constinit const GgufFamily kHyV3Gguf = {
    .gguf = "hy_v3",
    .model_type = "hy_v3",
    .architecture = "HYV3ForCausalLM",
    .names = kHyV3Names,
    .complete = complete_hy_v3,
};

}  // namespace kt::inline models
