// Llama 2 and 3, dense.
#include "models/family.h"
#include "weights/gguf/gguf_config.h"

namespace kt::inline models {

ModelSpec describe_llama(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  GqaSpec gqa = read_gqa(config, spec);
  gqa.qkv_bias = gqa.o_bias = config.boolean("attention_bias", false);
  gqa.rope = read_rope(config, {.dims = gqa.head_dim}, spec);
  fill_layers(config, gqa, std::nullopt, spec);
  for (LayerSpec& layer : spec.layers)
    std::get<DenseSpec>(layer.feed_forward).bias = config.boolean("mlp_bias", false);
  return spec;
}

constinit const GgufFamily kLlamaGguf = {
    .gguf = "llama",
    .model_type = "llama",
    .architecture = "LlamaForCausalLM",
    .owns = [](const GgufHeader& header,
               const TensorFinder&) { return gguf_unsigned(header, "llama.expert_count").value_or(0) == 0; },
    .interleaved = true,
};

}  // namespace kt::inline models
