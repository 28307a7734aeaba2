// Qwen3, dense.
#include "models/family.h"

namespace kt::inline models {

ModelSpec describe_qwen3(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  GqaSpec gqa = read_gqa(config, spec, 128);
  gqa.qkv_bias = gqa.o_bias = config.boolean("attention_bias", false);
  gqa.norm = GqaSpec::Norm::kHead;
  gqa.rope = read_rope(config, {.dims = gqa.head_dim}, spec);
  fill_layers(config, gqa, std::nullopt, spec);
  if (read_layer_types(config, spec) || !config.boolean("use_sliding_window", false)) return spec;
  // All but the first max_window_layers.
  for (size_t i = static_cast<size_t>(config.integer("max_window_layers", 28)); i < spec.layers.size(); ++i)
    set_window(spec.layers[i], config.integer("sliding_window", 4096, 1));
  return spec;
}

constinit const GgufFamily kQwen3Gguf = {
    .gguf = "qwen3",
    .model_type = "qwen3",
    .architecture = "Qwen3ForCausalLM",
};

}  // namespace kt::inline models
