// MiniMax-M2: norms over all heads' numbers together, a part of each head is rotated, sigmoid routing with a
// correction bias and no groups.
#include "models/family.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {

ModelSpec describe_minimax_m2(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  GqaSpec gqa = read_gqa(config, spec, 128);
  if (!config.boolean("use_qk_norm", true)) config.unsupported("use_qk_norm", "true");
  gqa.norm = GqaSpec::Norm::kAll;
  // Published configs give the numbers that are rotated, newer ones their part of a head.
  const double rotary = config.integer("rotary_dim", gqa.head_dim, 2);
  gqa.rope = read_rope(config, {.dims = gqa.head_dim, .theta = 5e6, .part = rotary / gqa.head_dim}, spec);
  MoeSpec moe = read_experts(config, {.experts = "num_local_experts", .inter = "intermediate_size"});
  if (config.string("scoring_func", "sigmoid") != "sigmoid") config.unsupported("scoring_func", "sigmoid");
  moe.router = {.score = RouterSpec::Score::kSigmoid, .normalise = true, .correction_bias = true};
  moe.names.router = "block_sparse_moe.gate";
  moe.names.correction_bias = "block_sparse_moe.e_score_correction_bias";
  fill_layers(config, gqa, moe, spec);
  return spec;
}

namespace {

constexpr GgufName kMinimaxM2Names[] = {
    {"ffn_gate_inp", "block_sparse_moe.gate"},
    {"exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias"},
};

void complete_minimax_m2(GgufFacts& facts) {
  facts.rename_expert_size();
  facts.add_dense_layers(GgufFacts::DenseLayers::kUnsaid);
  facts.add_if_absent("norm_topk_prob", false);
}

}  // namespace

constinit const GgufFamily kMinimaxM2Gguf = {
    .gguf = "minimax-m2",
    .model_type = "minimax_m2",
    .architecture = "MiniMaxM2ForCausalLM",
    .names = kMinimaxM2Names,
    .experts = "block_sparse_moe.experts",
    .projections = {"w1", "w3", "w2"},
    .expert_count = "num_local_experts",
    .complete = complete_minimax_m2,
};

}  // namespace kt::inline models
