#include "models/families.h"

#include <algorithm>
#include <array>
#include <vector>

#include "models/family.h"
#include "text/shown.h"
#include "weights/gguf/gguf_config.h"

namespace kt::inline models {
namespace {

struct Family {
  std::string_view architecture, model_type;  // either finds it; the type is the family's name
  ModelSpec (*describe)(const ConfigReader&);
  const GgufFamily* gguf = nullptr;  // null: such files are those of another row
};

constexpr auto kFamilies = std::to_array<Family>({
    {"DeepseekV2ForCausalLM", "deepseek_v2", describe_deepseek_v2, &kDeepseekV2Gguf},
    {"DeepseekV3ForCausalLM", "deepseek_v3", describe_deepseek_v3, &kDeepseekV3Gguf},
    {"KimiK2ForCausalLM", "kimi_k2", describe_deepseek_v3},
    {"KimiK25ForConditionalGeneration", "kimi_k25", describe_deepseek_v3},
    {"DeepseekV32ForCausalLM", "deepseek_v32", describe_deepseek_v32, &kDeepseekV32Gguf},
    {"Dots1ForCausalLM", "dots1", describe_dots1, &kDots1Gguf},
    {"Ernie4_5_MoeForCausalLM", "ernie4_5_moe", describe_ernie4_5_moe, &kErnie45MoeGguf},
    {"Gemma4ForConditionalGeneration", "gemma4", describe_gemma4},
    {"Gemma4ForCausalLM", "gemma4_text", describe_gemma4, &kGemma4Gguf},
    {"Glm4MoeForCausalLM", "glm4_moe", describe_glm4_moe, &kGlm4MoeGguf},
    {"Glm4MoeLiteForCausalLM", "glm4_moe_lite", describe_glm4_moe_lite},
    {"GlmMoeDsaForCausalLM", "glm_moe_dsa", describe_glm_moe_dsa, &kGlmMoeDsaGguf},
    {"GptOssForCausalLM", "gpt_oss", describe_gpt_oss, &kGptOssGguf},
    {"HYV3ForCausalLM", "hy_v3", describe_hy_v3, &kHyV3Gguf},
    {"LlamaForCausalLM", "llama", describe_llama, &kLlamaGguf},
    {"Llama4ForConditionalGeneration", "llama4", describe_llama4},
    {"Llama4ForCausalLM", "llama4_text", describe_llama4, &kLlama4Gguf},
    {"MiniMaxM2ForCausalLM", "minimax_m2", describe_minimax_m2, &kMinimaxM2Gguf},
    {"Mistral4ForCausalLM", "mistral4", describe_mistral4, &kMistral4Gguf},
    {"MixtralForCausalLM", "mixtral", describe_mixtral, &kMixtralGguf},
    {"Qwen2MoeForCausalLM", "qwen2_moe", describe_qwen2_moe, &kQwen2MoeGguf},
    {"Qwen3ForCausalLM", "qwen3", describe_qwen3, &kQwen3Gguf},
    {"Qwen3MoeForCausalLM", "qwen3_moe", describe_qwen3_moe, &kQwen3MoeGguf},
    {"Qwen3NextForCausalLM", "qwen3_next", describe_qwen3_next, &kQwen3NextGguf},
    {"Qwen3_5ForConditionalGeneration", "qwen3_5", describe_qwen3_5},
    {"Qwen3_5ForCausalLM", "qwen3_5_text", describe_qwen3_5, &kQwen35Gguf},
    {"Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", describe_qwen3_5_moe},
    {"Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", describe_qwen3_5_moe, &kQwen35MoeGguf},
    {"SmallThinkerForCausalLM", "smallthinker", describe_smallthinker, &kSmallThinkerGguf},
    {"SolarOpenForCausalLM", "solar_open", describe_solar_open},
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

GgufFamilies gguf_families() {
  static const std::vector<const GgufFamily*> families = [] {
    std::vector<const GgufFamily*> out;
    for (const Family& family : kFamilies)
      if (family.gguf) out.push_back(family.gguf);
    return out;
  }();
  return families;
}

bool runs_family(std::string_view model_type) {
  return std::ranges::find(kFamilies, model_type, &Family::model_type) != kFamilies.end();
}

ModelSpec describe_model(const Json& json, std::string_view name, const KeyNames& key_names) {
  if (json.is_object() && json.empty()) fail("{}: no config.json that says what the model is", name);
  const ConfigReader config(json, name, key_names);
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
  if (!checkpoint.is_gguf()) return describe_model(checkpoint.config_json(), checkpoint.path());
  const GgufHeader& header = checkpoint.gguf();
  const std::string_view architecture = gguf_string(header, "general.architecture");
  if (checkpoint.gguf_family() == nullptr)
    fail_as(ErrorKind::kUnsupported, "{}: general.architecture {} is not known; known: {}", header.name,
            architecture.empty() ? "(none)" : shown(architecture),
            gguf_architectures(checkpoint.known_families()));
  return describe_model(checkpoint.config_json(), header.name, gguf_key_names(header));
}

}  // namespace kt::inline models
