#include "models/families.h"

#include <array>

#include "models/family.h"
#include "text/shown.h"
#include "weights/gguf/gguf_config.h"
#include "weights/gguf/gguf_names.h"

namespace kt {
namespace {

struct Family {
  std::string_view architecture, model_type;  // either finds it; the type is the family's name
  ModelSpec (*describe)(const ConfigReader&);
};

constexpr auto kFamilies = std::to_array<Family>({
    {"DeepseekV2ForCausalLM", "deepseek_v2", describe_deepseek_v2},
    {"DeepseekV3ForCausalLM", "deepseek_v3", describe_deepseek_v3},
    {"KimiK2ForCausalLM", "kimi_k2", describe_deepseek_v3},
    {"Glm4MoeForCausalLM", "glm4_moe", describe_glm4_moe},
    {"GptOssForCausalLM", "gpt_oss", describe_gpt_oss},
    {"LlamaForCausalLM", "llama", describe_llama},
    {"MiniMaxM2ForCausalLM", "minimax_m2", describe_minimax_m2},
    {"MixtralForCausalLM", "mixtral", describe_mixtral},
    {"Qwen2MoeForCausalLM", "qwen2_moe", describe_qwen2_moe},
    {"Qwen3ForCausalLM", "qwen3", describe_qwen3},
    {"Qwen3MoeForCausalLM", "qwen3_moe", describe_qwen3_moe},
});

// The type first: one architecture may serve several, and a config nested in another has only that.
const Family* find(const ModelConfig& model) {
  for (const Family& family : kFamilies)
    if (family.model_type == model.model_type) return &family;
  for (const Family& family : kFamilies)
    if (family.architecture == model.architecture) return &family;
  return nullptr;
}

}  // namespace

ModelSpec describe_model(const Json& json, std::string_view name) {
  if (json.is_object() && json.empty()) fail("{}: no config.json that says what the model is", name);
  const ConfigReader config(json, name);
  const ModelConfig& model = config.model();
  const Family* const family = find(model);
  if (family == nullptr) {
    std::string known;
    for (const Family& each : kFamilies) known += text("{}{}", known.empty() ? "" : ", ", each.architecture);
    fail_as(ErrorKind::kUnsupported, "{}: architecture {} (model_type {}) is not known; known: {}", name,
            model.architecture.empty() ? "(none)" : shown(model.architecture),
            model.model_type.empty() ? "(none)" : shown(model.model_type), known);
  }
  ModelSpec spec = family->describe(config);
  spec.family = family->model_type;
  if (!spec.moe())
    for (int layer = 0; layer < model.layers; ++layer)
      if (model.is_moe_layer(layer))
        fail("{}: {} experts, but {} is a dense family", name, model.experts, family->model_type);
  return spec;
}

ModelSpec describe_model(const Checkpoint& checkpoint) {
  if (checkpoint.is_gguf()) {
    const std::string_view architecture = gguf_string(checkpoint.gguf(), "general.architecture");
    const GgufFamily* const family = gguf_family(checkpoint.config().model_type);
    if (family == nullptr || family->gguf != architecture)
      fail_as(ErrorKind::kUnsupported, "{}: general.architecture {} is not known; known: {}",
              checkpoint.path(), architecture.empty() ? "(none)" : shown(architecture),
              known_gguf_architectures());
  }
  return describe_model(checkpoint.config_json(), checkpoint.path());
}

}  // namespace kt
