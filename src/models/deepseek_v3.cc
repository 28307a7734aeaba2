// DeepSeek-V3, R1, and Kimi-K2, which keeps the same architecture: latent attention, sigmoid routing within
// the best groups, chosen with a correction bias, a shared expert, first layers dense.
#include "models/family.h"

namespace kt {

ModelSpec describe_deepseek_v3(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  read_mla(config, spec);
  read_rope(config, {.dims = spec.mla.rope}, spec);
  spec.rope.interleaved = config.boolean("rope_interleave", true);
  scale_softmax_for_rope(config, spec);
  read_experts(config, {.experts = "n_routed_experts"}, spec);
  read_sigmoid_router(config, 2.5, spec);
  read_shared_experts(config, spec);
  return spec;
}

}  // namespace kt
