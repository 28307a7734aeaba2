// DeepSeek-V3.2: DeepSeek-V3's layers, which attend to the keys that an indexer chooses. Its queries and keys rotate in
// halves, those of attention in neighbours.
#include "models/dsa_gguf.h"
#include "models/family.h"

namespace kt::inline models {

ModelSpec describe_deepseek_v32(const ConfigReader& config) {
  return describe_indexed(config, {.norm_eps = 1e-6, .neighbours = false});
}

constinit const GgufFamily kDeepseekV32Gguf = {
    .gguf = "deepseek32",
    .model_type = "deepseek_v32",
    .architecture = "DeepseekV32ForCausalLM",
    .names = kIndexedGgufNames,
    .expert_count = "n_routed_experts",
    .complete = complete_indexed,
};

}  // namespace kt::inline models
