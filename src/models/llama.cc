// Llama 2 and 3, dense.
#include "models/family.h"

namespace kt {

ModelSpec describe_llama(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  refuse_mlp_bias(config);
  GqaSpec gqa = read_gqa(config, spec);
  gqa.qkv_bias = gqa.o_bias = config.boolean("attention_bias", false);
  gqa.rope = read_rope(config, {.dims = gqa.head_dim}, spec);
  fill_layers(config, gqa, std::nullopt, spec);
  return spec;
}

}  // namespace kt
