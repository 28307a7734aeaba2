// What families of the gated delta rule share: how their configs describe it, and which layers attend.
#include <algorithm>

#include "models/delta_gguf.h"
#include "models/family.h"
#include "text/shown.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {
namespace {

// Said by what reads GGUF files alone.
constexpr std::string_view kInTurns = "linear_value_heads_in_turns";

DeltaSpec read_delta(const ConfigReader& config, const DeltaSpec::Names& names) {
  DeltaSpec delta{.shape = {.key_heads = config.integer("linear_num_key_heads"),
                            .value_heads = config.integer("linear_num_value_heads"),
                            .key_dim = config.integer("linear_key_head_dim"),
                            .value_dim = config.integer("linear_value_head_dim")},
                  .taps = config.integer("linear_conv_kernel_dim"),
                  .names = names};
  delta.shape.in_turns = config.boolean(kInTurns, false);
  if (delta.shape.value_heads % delta.shape.key_heads != 0)
    config.wrong("linear_num_value_heads",
                 text("a multiple of linear_num_key_heads, {}", delta.shape.key_heads));
  const int64_t widest =
      std::max(int64_t{delta.shape.key_heads} * delta.shape.key_dim,
               int64_t{delta.shape.value_heads} * std::max(delta.shape.value_dim, delta.shape.key_dim));
  if (widest > ConfigReader::kMost)
    fail("{}: {} numbers of all heads, at most {} are read", config.place("linear_num_value_heads"), widest,
         ConfigReader::kMost);
  if (delta.taps > kMostTaps) config.wrong("linear_conv_kernel_dim", text("at most {}", kMostTaps));
  return delta;
}

GqaSpec read_gated_attention(const ConfigReader& config, ModelSpec& spec) {
  require_flag(config, "attn_output_gate", true);
  GqaSpec gqa = read_gqa(config, spec, 256);
  gqa.qkv_bias = gqa.o_bias = config.boolean("attention_bias", false);
  gqa.norm = GqaSpec::Norm::kHead;
  gqa.gated = true;
  gqa.rope = read_rope(config, {.dims = gqa.head_dim, .part = 0.25}, spec);
  return gqa;
}

// Which layers attend.
std::vector<bool> read_attending(const ConfigReader& config, size_t layers) {
  std::vector<bool> out(layers);
  const std::vector<std::string> types = config.strings("layer_types");
  if (!config.has("layer_types")) {
    const size_t interval = static_cast<size_t>(config.integer("full_attention_interval", 4, 1));
    for (size_t i = 0; i < layers; ++i) out[i] = (i + 1) % interval == 0;
    return out;
  }
  if (types.size() != layers) config.wrong("layer_types", text("one string for each of {} layers", layers));
  for (size_t i = 0; i < layers; ++i) {
    out[i] = types[i] == "full_attention";
    if (!out[i] && types[i] != "linear_attention")
      fail_as(ErrorKind::kUnsupported, "{}[{}] is {}; supported: full_attention, linear_attention",
              config.place("layer_types"), i, shown(types[i]));
  }
  return out;
}

}  // namespace

void complete_delta(GgufFacts& facts) {
  Json& config = facts.config();
  const uint64_t heads = facts.known("linear_num_value_heads"), all = facts.known("linear_inner_size");
  if (heads > 0 && all % heads == 0) facts.add_if_absent("linear_value_head_dim", all / heads);
  // Which layers attend: an interval, a list of those that do not, or no word, by the age of the file. Tensors tell.
  Json types = Json::array();
  for (uint64_t i = 0; i < std::min<uint64_t>(facts.known("num_hidden_layers"), 10000); ++i)
    types.push_back(facts.find(text("blk.{}.ssm_out.weight", i)) ? "linear_attention" : "full_attention");
  config["layer_types"] = types;
  const Tensor* const shared = facts.in_any_layer("ffn_gate_shexp.weight");
  if (shared != nullptr && !shared->shape.empty())
    facts.add_if_absent("shared_expert_intermediate_size", static_cast<uint64_t>(shared->shape[0]));
  config["attention_bias"] = facts.in_any_layer("attn_q.bias") != nullptr;
  config[std::string(kInTurns)] = facts.in_any_layer("ssm_beta.weight") != nullptr;
  facts.add_if_absent("norm_topk_prob", true);
}

void read_delta_layers(const ConfigReader& config, const DeltaSpec::Names& names, ModelSpec& spec) {
  // It is also the convolution's.
  const std::string activation = config.string("hidden_act", "silu");
  if (activation != "silu" && activation != "swish") config.unsupported("hidden_act", "silu");
  const std::string gate = config.string("output_gate_type", "silu");
  if (gate != "silu" && gate != "swish") config.unsupported("output_gate_type", "silu");
  const DeltaSpec delta = read_delta(config, names);
  const GqaSpec gqa = read_gated_attention(config, spec);
  const std::vector<bool> attends = read_attending(config, spec.layers.size());
  for (size_t i = 0; i < spec.layers.size(); ++i)
    spec.layers[i].mixer = attends[i] ? MixerSpec(gqa) : MixerSpec(delta);
  spec.norms_add_one = true;
}

}  // namespace kt::inline models
