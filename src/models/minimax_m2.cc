// MiniMax-M2: norms over all heads' numbers together, a part of each head turns, sigmoid routing with a
// correction bias and no groups.
#include "models/family.h"

namespace kt {

ModelSpec describe_minimax_m2(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  read_gqa(config, spec, 128);
  if (!config.boolean("use_qk_norm", true)) config.unsupported("use_qk_norm", "true");
  spec.gqa.norm = GqaSpec::Norm::kAll;
  // Published configs give the numbers that turn, newer ones their part of a head.
  const double rotary = config.integer("rotary_dim", spec.gqa.head_dim, 2);
  read_rope(config, {.dims = spec.gqa.head_dim, .theta = 5e6, .part = rotary / spec.gqa.head_dim}, spec);
  read_experts(config, {.experts = "num_local_experts", .inter = "intermediate_size"}, spec);
  if (config.string("scoring_func", "sigmoid") != "sigmoid") config.unsupported("scoring_func", "sigmoid");
  spec.moe.router = {.score = RouterSpec::Score::kSigmoid, .normalise = true, .correction_bias = true};
  spec.names.router = "block_sparse_moe.gate";
  spec.names.correction_bias = "block_sparse_moe.e_score_correction_bias";
  return spec;
}

}  // namespace kt
