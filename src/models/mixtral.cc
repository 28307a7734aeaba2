// Mixtral: Llama's attention, softmax routing whose chosen weights sum to one.
#include "models/family.h"
#include "weights/gguf/gguf_config.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {

ModelSpec describe_mixtral(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-5);
  GqaSpec gqa = read_gqa(config, spec);
  gqa.rope = read_rope(config, {.dims = gqa.head_dim, .theta = 1e6}, spec);
  if (config.has("sliding_window")) gqa.window = config.integer("sliding_window");
  MoeSpec moe = read_experts(config, {.experts = "num_local_experts", .inter = "intermediate_size"});
  moe.router.normalise = true;
  moe.names.router = "block_sparse_moe.gate";
  fill_layers(config, gqa, moe, spec);
  return spec;
}

namespace {

constexpr GgufName kMixtralNames[] = {{"ffn_gate_inp", "block_sparse_moe.gate"}};

void complete_mixtral(GgufFacts& facts) {
  facts.rename_expert_size();
  facts.add_dense_layers(GgufFacts::DenseLayers::kUnsaid);
}

}  // namespace

constinit const GgufFamily kMixtralGguf = {
    .gguf = "llama",
    .model_type = "mixtral",
    .architecture = "MixtralForCausalLM",
    .owns = [](const GgufHeader& header,
               const TensorFinder&) { return gguf_unsigned(header, "llama.expert_count").value_or(0) > 0; },
    .interleaved = true,
    .names = kMixtralNames,
    .experts = "block_sparse_moe.experts",
    .projections = {"w1", "w3", "w2"},
    .expert_count = "num_local_experts",
    .complete = complete_mixtral,
};

}  // namespace kt::inline models
