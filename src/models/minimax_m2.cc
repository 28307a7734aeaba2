// MiniMax-M2: norms over all heads' numbers together, a part of each head is rotated, sigmoid routing with a
// correction bias and no groups.
#include "models/family.h"

namespace kt {

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

}  // namespace kt
