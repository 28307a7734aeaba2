// DeepSeek-V3, R1, and Kimi-K2, which keeps the same architecture: latent attention, sigmoid routing within
// the best groups, chosen with a correction bias, a shared expert, first layers dense.
#include "models/family.h"

namespace kt {

ModelSpec describe_deepseek_v3(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  MlaSpec mla = read_mla(config);
  mla.rope = read_rope(config, {.dims = mla.rotated}, spec);
  mla.rope.interleaved = config.boolean("rope_interleave", true);
  scale_softmax_for_rope(config, mla);
  MoeSpec moe = read_experts(config, {.experts = "n_routed_experts"});
  read_sigmoid_router(config, 2.5, moe);
  read_shared_experts(config, moe);
  fill_layers(config, mla, moe, spec);
  return spec;
}

}  // namespace kt
