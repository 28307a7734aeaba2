// Llama 4: layers that rotate neighbours and see a chunk of the text, and every fourth that does neither and whose
// queries grow; experts that read what their sigmoid weights, beside a shared one; dense layers between.
#include <algorithm>

#include "models/family.h"
#include "text/shown.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {
namespace {

// Which layers rotate: no_rope_layers is 1 where they do. An empty list says nothing.
std::vector<bool> read_rotating(const ConfigReader& config, size_t layers) {
  std::vector<bool> out = read_layer_flags(config, "no_rope_layers", layers);
  if (!out.empty()) return out;
  const auto interval = static_cast<size_t>(config.integer("no_rope_layer_interval", 4, 1));
  for (size_t i = 0; i < layers; ++i) out.push_back((i + 1) % interval != 0);
  return out;
}

// Which layers see chunks: those that rotate, where nothing is said of it.
std::vector<bool> read_chunked(const ConfigReader& config, const std::vector<bool>& rotating) {
  if (!config.has("layer_types")) return rotating;
  const std::vector<std::string> types = config.strings("layer_types");
  if (types.size() != rotating.size())
    config.wrong("layer_types", text("one string for each of {} layers", rotating.size()));
  std::vector<bool> out;
  for (size_t i = 0; i < types.size(); ++i) {
    out.push_back(types[i] == "chunked_attention");
    if (!out.back() && types[i] != "full_attention")
      fail_as(ErrorKind::kUnsupported, "{}[{}] is {}; supported: chunked_attention, full_attention",
              config.place("layer_types"), i, shown(types[i]));
  }
  return out;
}

QueryGrowth read_temperature(const ConfigReader& config) {
  if (!config.truth("attn_temperature_tuning", true)) return {};
  const QueryGrowth growth{
      .beta = config.number("attn_scale", 0.1), .length = config.integer("floor_scale", 8192, 1), .ahead = 1};
  if (growth.beta < 0) config.wrong("attn_scale", "a number of at least 0");
  return growth;
}

void read_attention(const ConfigReader& config, ModelSpec& spec) {
  GqaSpec still = read_gqa(config, spec, 128);
  still.qkv_bias = still.o_bias = config.boolean("attention_bias", false);
  GqaSpec rotated = still;
  rotated.rope = read_rope(config, {.dims = still.head_dim, .theta = 500000}, spec);
  rotated.rope.interleaved = true;
  if (config.boolean("use_qk_norm", true)) rotated.norm = GqaSpec::Norm::kHeadLast;
  still.growth = read_temperature(config);
  const int chunk = config.integer("attention_chunk_size", 8192, 1);
  const std::vector<bool> rotating = read_rotating(config, spec.layers.size()),
                          chunked = read_chunked(config, rotating);
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    GqaSpec gqa = rotating[i] ? rotated : still;
    if (chunked[i]) gqa.chunk = chunk;
    spec.layers[i].mixer = gqa;
  }
}

std::optional<MoeSpec> read_routed(const ConfigReader& config) {
  if (config.integer("num_local_experts", 16) == 0) return std::nullopt;
  MoeSpec moe = read_experts(config, {.experts = "num_local_experts", .inter = "intermediate_size"});
  moe.router = {.score = RouterSpec::Score::kSigmoid, .score_of_chosen = true};
  moe.weighs_inputs = true;
  moe.shared_inter = moe.inter;
  moe.names.router = "feed_forward.router";
  moe.names.shared = "feed_forward.shared_expert";
  return moe;
}

}  // namespace

ModelSpec describe_llama4(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-5);
  fill_layers(config, {}, read_routed(config), spec);
  for (LayerSpec& layer : spec.layers) {
    auto* const dense = std::get_if<DenseSpec>(&layer.feed_forward);
    if (!dense) continue;
    dense->inter = config.integer("intermediate_size_mlp");
    dense->names = {"feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"};
  }
  read_attention(config, spec);
  return spec;
}

namespace {

constexpr GgufName kLlama4Names[] = {
    {"ffn_gate_inp", "feed_forward.router"},
    {"ffn_gate", "feed_forward.gate_proj"},
    {"ffn_up", "feed_forward.up_proj"},
    {"ffn_down", "feed_forward.down_proj"},
    {"ffn_gate_shexp", "feed_forward.shared_expert.gate_proj"},
    {"ffn_up_shexp", "feed_forward.shared_expert.up_proj"},
    {"ffn_down_shexp", "feed_forward.shared_expert.down_proj"},
};

// Files say nothing of norms of q and k, which the model of 128 experts alone lacks, nor of chunks, but 0 where there
// are none: there every layer rotates. Queries grow as the published models' do.
void complete_llama4(GgufFacts& facts) {
  Json& config = facts.config();
  if (config.contains("intermediate_size")) config["intermediate_size_mlp"] = config["intermediate_size"];
  facts.rename_expert_size();
  facts.add_dense_layers(GgufFacts::DenseLayers::kListed);
  config["use_qk_norm"] = facts.known("num_local_experts") != 128;
  if (!config.contains("sliding_window")) return;
  const uint64_t chunk = facts.known("sliding_window");
  config.erase("sliding_window");
  if (chunk > 0) {
    config["attention_chunk_size"] = chunk;
    return;
  }
  for (uint64_t i = 0; i < std::min<uint64_t>(facts.known("num_hidden_layers"), 10000); ++i) {
    config["no_rope_layers"].push_back(1);
    config["layer_types"].push_back("full_attention");
  }
}

}  // namespace

constinit const GgufFamily kLlama4Gguf = {
    .gguf = "llama4",
    .model_type = "llama4_text",
    .architecture = "Llama4ForCausalLM",
    .names = kLlama4Names,
    .experts = "feed_forward.experts",
    .expert_count = "num_local_experts",
    .complete = complete_llama4,
};

}  // namespace kt::inline models
