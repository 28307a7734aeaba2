// GLM-5, 5.1 and 5.2: DeepSeek-V3's layers without groups, which attend to the keys that an indexer chooses; in 5.2
// most layers share the choice of one before them.
#include "models/dsa_gguf.h"
#include "models/family.h"

namespace kt::inline models {

ModelSpec describe_glm_moe_dsa(const ConfigReader& config) {
  return describe_indexed(config, {.norm_eps = 1e-5, .neighbours = true});
}

constinit const GgufFamily kGlmMoeDsaGguf = {
    .gguf = "glm-dsa",
    .model_type = "glm_moe_dsa",
    .architecture = "GlmMoeDsaForCausalLM",
    .names = kIndexedGgufNames,
    .expert_count = "n_routed_experts",
    .complete = complete_indexed,
};

}  // namespace kt::inline models
