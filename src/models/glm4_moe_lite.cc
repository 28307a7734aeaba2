// GLM-4.7-Flash: latent attention and sigmoid routing as DeepSeek-V3's, without groups or stretched positions in
// what is published. Its GGUF files are deepseek2.
#include "models/family.h"

namespace kt::inline models {

ModelSpec describe_glm4_moe_lite(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-5);
  refuse_moe_layer_freq(config);
  require_dense_layers(config);
  const MlaSpec mla = read_rotating_mla(config, spec);
  MoeSpec moe = read_experts(config, {.experts = "n_routed_experts"});
  read_sigmoid_router(config, 1.8, moe);
  read_shared_experts(config, moe);
  fill_layers(config, mla, moe, spec);
  return spec;
}

}  // namespace kt::inline models
