// Qwen3.5, dense: the layers of its sister with experts (qwen3_5_moe.cc), each with an MLP.
#include "models/delta_gguf.h"
#include "models/family.h"

namespace kt::inline models {

ModelSpec describe_qwen3_5(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  fill_layers(config, {}, std::nullopt, spec);
  read_delta_layers(config, {}, spec);
  return spec;
}

constinit const GgufFamily kQwen35Gguf = {
    .gguf = "qwen35",
    .model_type = "qwen3_5_text",
    .architecture = "Qwen3_5ForCausalLM",
    .names = kDeltaGgufNames,
    .complete = complete_delta,
};

}  // namespace kt::inline models
