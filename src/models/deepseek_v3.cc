// DeepSeek-V3, R1, and Kimi-K2 to K2.7, which keep the same architecture (the newer ones inside a model that sees
// images): latent attention, sigmoid routing within the best groups, chosen with a correction bias, a shared expert,
// first layers dense.
#include <algorithm>

#include "models/family.h"
#include "weights/gguf/gguf_config.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {

ModelSpec describe_deepseek_v3(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  refuse_moe_layer_freq(config);
  refuse_query_growth(config);
  const MlaSpec mla = read_rotating_mla(config, spec);
  MoeSpec moe = read_experts(config, {.experts = "n_routed_experts"});
  read_sigmoid_router(config, 2.5, moe);
  read_shared_experts(config, moe);
  fill_layers(config, mla, moe, spec);
  return spec;
}

void complete_deepseek_v3(GgufFacts& facts) {
  facts.add_dense_layers(GgufFacts::DenseLayers::kCounted);
  facts.add_if_absent("norm_topk_prob", false);
  facts.add_if_absent("routed_scaling_factor", 1.0);
  facts.config()["topk_method"] = "noaux_tc";
}

bool scores_by_sigmoid(const GgufHeader& header, const TensorFinder& find) {
  if (const auto gating = gguf_unsigned(header, "deepseek2.expert_gating_func"))
    return *gating == kGgufSigmoid;
  constexpr uint64_t kMostLayers = 10000;
  const uint64_t layers = std::min(gguf_unsigned(header, "deepseek2.block_count").value_or(0), kMostLayers);
  for (uint64_t i = 0; i < layers; ++i)
    if (find(text("blk.{}.exp_probs_b.bias", i))) return true;
  return false;
}

constinit const GgufFamily kDeepseekV3Gguf = {
    .gguf = "deepseek2",
    .model_type = "deepseek_v3",
    .architecture = "DeepseekV3ForCausalLM",
    .owns = scores_by_sigmoid,
    .expert_count = "n_routed_experts",
    .complete = complete_deepseek_v3,
};

}  // namespace kt::inline models
