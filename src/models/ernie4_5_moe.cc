// ERNIE-4.5: grouped-query attention that rotates neighbours, softmax routing chosen with a correction bias, shared
// experts; which layers have experts is said by a start, an end and an interval.
#include <utility>

#include "models/family.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {

ModelSpec describe_ernie4_5_moe(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-5);
  spec.tied_embeddings = config.boolean("tie_word_embeddings", true);
  require_flag(config, "use_bias", false);
  require_flag(config, "moe_use_aux_free", true);
  require_word(config, "moe_gate", "topk");
  require_word(config, "moe_gate_act", "softmax");
  require_word(config, "scoring_func", "softmax");
  if (config.number("compression_ratio", 1) != 1) config.unsupported("compression_ratio", "1");
  GqaSpec gqa = read_gqa(config, spec);
  gqa.rope = read_rope(config, {.dims = gqa.head_dim, .theta = 500000}, spec);
  gqa.rope.interleaved = true;
  MoeSpec moe = read_experts(config, {.experts = "moe_num_experts", .top_k = "moe_k"});
  moe.router = {.normalise = true,
                .normalise_least = config.number("moe_norm_min", 1e-12),
                .scale = config.number("routed_scaling_factor", 1),
                .correction_bias = true};
  read_shared_experts(config, moe, "moe_num_shared_experts");
  moe.names.correction_bias = "mlp.moe_statics.e_score_correction_bias";
  fill_layers(config, gqa, moe, spec);
  return spec;
}

namespace {

constexpr GgufName kErnie45MoeNames[] = {
    {"exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias"},
};

// Files do not say where experts end; the tensors do.
void complete_ernie4_5_moe(GgufFacts& facts) {
  Json& config = facts.config();
  facts.add_dense_layers(GgufFacts::DenseLayers::kCounted);
  constexpr std::pair<const char*, const char*> kWords[] = {
      {"first_k_dense_replace", "moe_layer_start_index"},
      {"interleave_moe_layer_step", "moe_layer_interval"},
      {"num_experts_per_tok", "moe_k"},
      {"n_shared_experts", "moe_num_shared_experts"},
  };
  for (const auto& [usual, word] : kWords) {
    if (!config.contains(usual)) continue;
    Json value = std::move(config[usual]);
    config.erase(usual);
    config[word] = std::move(value);
  }
}

}  // namespace

constinit const GgufFamily kErnie45MoeGguf = {
    .gguf = "ernie4_5-moe",
    .model_type = "ernie4_5_moe",
    .architecture = "Ernie4_5_MoeForCausalLM",
    .names = kErnie45MoeNames,
    .expert_count = "moe_num_experts",
    .complete = complete_ernie4_5_moe,
};

}  // namespace kt::inline models
