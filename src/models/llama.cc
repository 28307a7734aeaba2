// Llama 2 and 3, dense.
#include "models/family.h"

namespace kt {

ModelSpec describe_llama(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  refuse_mlp_bias(config);
  read_gqa(config, spec);
  spec.gqa.qkv_bias = spec.gqa.o_bias = config.boolean("attention_bias", false);
  read_rope(config, {.dims = spec.gqa.head_dim}, spec);
  return spec;
}

}  // namespace kt
