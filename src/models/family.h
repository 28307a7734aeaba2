// What families share: the parts of a ModelSpec read in the words most configs use, and the families
// themselves. Each describe_* and what its GGUF files have of their own is a file; families.cc has the table.
#pragma once
#include <optional>
#include <string_view>

#include "models/config_reader.h"
#include "models/spec.h"
#include "weights/gguf/gguf_family.h"

namespace kt::inline models {

// Sizes and norms; as many layers as the config says, whose parts fill_layers() gives.
ModelSpec describe_common(const ConfigReader& config, double norm_eps);

// By its name in the config; `fallback` where that is silent.
Activation read_activation(const ConfigReader& config, std::string_view key, std::string_view fallback);
// All heads together are a row of a matrix; it has to stay a size like any other.
void check_row(const ConfigReader& config, int heads, int dims);

// heads, kv_heads, head_dim, and the scale of the softmax. Where the config is silent, heads have `head_dim`
// numbers, or hidden / heads where that is 0.
GqaSpec read_gqa(const ConfigReader& config, const ModelSpec& spec, int head_dim = 0);
// Ranks, dimensions and biases; the scale of the softmax, without the part rope adds.
MlaSpec read_mla(const ConfigReader& config);
// The same with positions and what they do to the softmax; neighbours rotate together unless rope_interleave says
// otherwise.
MlaSpec read_rotating_mla(const ConfigReader& config, ModelSpec& spec);

// rope_parameters, or the older rope_theta with rope_scaling. `dims` of a head are rotated where nothing is
// said of a part of them; `part` is what a config says that is silent about it. Where positions are stretched,
// the spec's context may grow.
struct RopeDefaults {
  int dims = 0;
  double theta = 10000, part = 1;
};
RopeSpec read_rope(const ConfigReader& config, RopeDefaults defaults, ModelSpec& spec);
// The same of the layers of one kind, "full_attention" ..., where rope_parameters has an object for each.
RopeSpec read_rope_of(const ConfigReader& config, std::string_view kind, RopeDefaults defaults,
                      ModelSpec& spec);
// Multi-head latent attention makes up for the stretched positions in the softmax: the square of
// 0.1 mscale_all_dim ln(factor) + 1. After read_rope.
void scale_softmax_for_rope(const ConfigReader& config, MlaSpec& mla);

// llama_4_scaling_beta beside rope's values; the length is the context before stretching. Both have to be there.
QueryGrowth read_query_growth(const ConfigReader& config);
// Refuses a model whose queries grow, where a file says so of a family that is published without.
void refuse_query_growth(const ConfigReader& config);

// experts, top_k, inter and activation. The family's words for them are for errors; other spellings are read as
// well.
struct ExpertKeys {
  std::string_view experts, inter = "moe_intermediate_size", top_k = "num_experts_per_tok";
};
MoeSpec read_experts(const ConfigReader& config, ExpertKeys keys);
// Groups of experts (n_group, topk_group), 1 where the config is silent.
void read_groups(const ConfigReader& config, MoeSpec& moe);
// Sigmoid scores chosen with a correction bias, groups by the sum of their best two: the router of several
// families.
void read_sigmoid_router(const ConfigReader& config, double scale, MoeSpec& moe);
// n_shared_experts of an expert's size each, stored as one.
void read_shared_experts(const ConfigReader& config, MoeSpec& moe, std::string_view key = "n_shared_experts");

// Refuses experts in every second layer: the published code has them there, transformers in all.
void refuse_moe_layer_freq(const ConfigReader& config);
// A config without a word about which layers are dense means the first one in some families and none in others:
// mlp_layer_types or first_k_dense_replace has to be there.
void require_dense_layers(const ConfigReader& config);
// Refuses biases of dense layers and shared experts (mlp_bias).
void refuse_mlp_bias(const ConfigReader& config);
// Refuses any other value of a key that may be absent: what nothing here computes.
void require_flag(const ConfigReader& config, std::string_view key, bool value);
void require_word(const ConfigReader& config, std::string_view key, std::string_view value);

// Every layer gets this mixer; those that model().is_moe_layer names these experts, the others a dense MLP.
void fill_layers(const ConfigReader& config, const MixerSpec& mixer, const std::optional<MoeSpec>& moe,
                 ModelSpec& spec);
// A list of 0 and 1, one for each layer; empty where the config has none, or an empty one.
std::vector<bool> read_layer_flags(const ConfigReader& config, std::string_view key, size_t layers);
// After fill_layers.
void set_window(LayerSpec& layer, int window);
// Windows of those layers that layer_types calls sliding_attention; false where the config has none.
bool read_layer_types(const ConfigReader& config, ModelSpec& spec);

// Layers of gated attention among layers of the delta rule, as layer_types says or full_attention_interval: mixers of
// all layers, after fill_layers. Norms add one.
void read_delta_layers(const ConfigReader& config, const DeltaSpec::Names& names, ModelSpec& spec);

// DeepSeek-V3's layers with an indexer each, or the choice of one before.
struct IndexedDefaults {
  double norm_eps = 1e-6;
  bool neighbours = false;  // of the indexer rotate together; else halves
};
ModelSpec describe_indexed(const ConfigReader& config, const IndexedDefaults& defaults);

ModelSpec describe_deepseek_v2(const ConfigReader& config);
ModelSpec describe_deepseek_v3(const ConfigReader& config);
ModelSpec describe_deepseek_v32(const ConfigReader& config);
ModelSpec describe_dots1(const ConfigReader& config);
ModelSpec describe_ernie4_5_moe(const ConfigReader& config);
ModelSpec describe_gemma4(const ConfigReader& config);
ModelSpec describe_glm4_moe(const ConfigReader& config);
ModelSpec describe_glm4_moe_lite(const ConfigReader& config);
ModelSpec describe_glm_moe_dsa(const ConfigReader& config);
ModelSpec describe_gpt_oss(const ConfigReader& config);
ModelSpec describe_hy_v3(const ConfigReader& config);
ModelSpec describe_llama(const ConfigReader& config);
ModelSpec describe_llama4(const ConfigReader& config);
ModelSpec describe_minimax_m2(const ConfigReader& config);
ModelSpec describe_mistral4(const ConfigReader& config);
ModelSpec describe_mixtral(const ConfigReader& config);
ModelSpec describe_qwen2_moe(const ConfigReader& config);
ModelSpec describe_qwen3(const ConfigReader& config);
ModelSpec describe_qwen3_moe(const ConfigReader& config);
ModelSpec describe_qwen3_5(const ConfigReader& config);
ModelSpec describe_qwen3_5_moe(const ConfigReader& config);
ModelSpec describe_qwen3_next(const ConfigReader& config);
ModelSpec describe_smallthinker(const ConfigReader& config);
ModelSpec describe_solar_open(const ConfigReader& config);

// Whether a deepseek2 file is of V3's kind. Where it does not say how experts are scored, as files from newer
// configs, a correction bias does: only sigmoid scores have one.
bool scores_by_sigmoid(const GgufHeader& header, const TensorFinder& find);
void complete_deepseek_v3(GgufFacts& facts);

extern const GgufFamily kDeepseekV2Gguf;
extern const GgufFamily kDeepseekV3Gguf;
extern const GgufFamily kDeepseekV32Gguf;
extern const GgufFamily kDots1Gguf;
extern const GgufFamily kErnie45MoeGguf;
extern const GgufFamily kGemma4Gguf;
extern const GgufFamily kGlm4MoeGguf;
extern const GgufFamily kGlmMoeDsaGguf;
extern const GgufFamily kGptOssGguf;
extern const GgufFamily kHyV3Gguf;
extern const GgufFamily kLlamaGguf;
extern const GgufFamily kLlama4Gguf;
extern const GgufFamily kMinimaxM2Gguf;
extern const GgufFamily kMistral4Gguf;
extern const GgufFamily kMixtralGguf;
extern const GgufFamily kQwen2MoeGguf;
extern const GgufFamily kQwen3Gguf;
extern const GgufFamily kQwen35Gguf;
extern const GgufFamily kQwen35MoeGguf;
extern const GgufFamily kQwen3MoeGguf;
extern const GgufFamily kQwen3NextGguf;
extern const GgufFamily kSmallThinkerGguf;

}  // namespace kt::inline models
