// Gemma 4: layers that see a window and layers that see all, each kind with heads and a rotation of its own; values
// that are normed too and, where all is seen, are the keys; norms behind each part of a layer as before it; routed
// experts beside an MLP, each between its own norms; logits under a cap.
#include <algorithm>
#include <cmath>

#include "models/family.h"
#include "text/shown.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {
namespace {

// Parts of sister models that nothing here computes.
void refuse_parts_of_sisters(const ConfigReader& config) {
  if (!config.has("hidden_size_per_layer_input")) config.missing("hidden_size_per_layer_input");
  if (config.integer("hidden_size_per_layer_input", 0) != 0)
    config.unsupported("hidden_size_per_layer_input", "0");
  if (config.integer("num_kv_shared_layers", 0) != 0) config.unsupported("num_kv_shared_layers", "0");
  if (config.string("use_bidirectional_attention", "vision") != "vision")
    config.unsupported("use_bidirectional_attention", "vision, null");
}

// Which layers see all: every sixth and the last, where nothing is said.
std::vector<bool> read_full_layers(const ConfigReader& config, size_t layers) {
  std::vector<bool> out;
  if (!config.has("layer_types")) {
    for (size_t i = 1; i <= layers; ++i) out.push_back(i % 6 == 0 || i == layers);
    return out;
  }
  const std::vector<std::string> types = config.strings("layer_types");
  if (types.size() != layers) config.wrong("layer_types", text("one string for each of {} layers", layers));
  for (size_t i = 0; i < layers; ++i) {
    out.push_back(types[i] == "full_attention");
    if (!out.back() && types[i] != "sliding_attention")
      fail_as(ErrorKind::kUnsupported, "{}[{}] is {}; supported: full_attention, sliding_attention",
              config.place("layer_types"), i, shown(types[i]));
  }
  if (!out.back())
    fail("{}[{}] is sliding_attention, expected full_attention in the last layer",
         config.place("layer_types"), layers - 1);
  return out;
}

// What layers that see all have of their own, or what each layer has, as newer configs list it.
void read_head_sizes(const ConfigReader& config, size_t layer, bool full, GqaSpec& gqa) {
  const std::optional<ConfigReader> listed = config.object("per_layer_config");
  const std::optional<ConfigReader> own = listed ? listed->object(text("{}", layer)) : config;
  if (!own || (!listed && !full)) return;
  const char* const dims = listed ? "head_dim" : "global_head_dim";
  const char* const heads = listed ? "num_key_value_heads" : "num_global_key_value_heads";
  gqa.head_dim = own->integer(dims, listed ? gqa.head_dim : 512, 2);
  if (gqa.head_dim % 2 != 0) own->wrong(dims, "an even number");
  check_row(config, gqa.heads, gqa.head_dim);
  // Where values are not the keys the key of the whole model says nothing.
  if (own->has(heads) && (listed || gqa.keys_as_values)) gqa.kv_heads = own->integer(heads);
  if (gqa.heads % gqa.kv_heads != 0)
    own->wrong(heads, text("a divisor of num_attention_heads, {}", gqa.heads));
}

GqaSpec read_heads(const ConfigReader& config, const ModelSpec& spec, size_t layer, bool full) {
  GqaSpec gqa = read_gqa(config, spec, 256);
  gqa.keys_as_values = full && config.boolean("attention_k_eq_v", false);
  read_head_sizes(config, layer, full, gqa);
  gqa.norm = GqaSpec::Norm::kHead;
  gqa.v_norm = true;
  gqa.qkv_bias = gqa.o_bias = config.boolean("attention_bias", false);
  gqa.scale = 1;
  if (!full) gqa.window = config.integer("sliding_window", 512, 1);
  return gqa;
}

RopeSpec read_rotation(const ConfigReader& config, bool full, const GqaSpec& gqa, ModelSpec& spec) {
  if (config.has("rope_parameters"))
    return read_rope_of(config, full ? "full_attention" : "sliding_attention", {.dims = gqa.head_dim}, spec);
  if (!full) return {.dims = gqa.head_dim, .theta = 10000};
  return {.dims = gqa.head_dim, .theta = 1e6, .still = gqa.head_dim / 2 - gqa.head_dim / 8};
}

FeedForwardSpec read_feed_forward(const ConfigReader& config) {
  const Activation activation = read_activation(config, "hidden_activation", "gelu_pytorch_tanh");
  const int inter = config.integer("intermediate_size");
  if (!config.boolean("enable_moe_block", false)) return DenseSpec{.inter = inter, .activation = activation};
  MoeSpec moe = read_experts(config, {.experts = "num_experts", .top_k = "top_k_experts"});
  moe.activation = activation;
  moe.router.normalise = true;
  moe.shared_inter = inter;
  moe.apart.emplace();
  moe.names.router = "router.proj";
  moe.names.experts = "experts";
  moe.names.shared = "mlp";
  return moe;
}

}  // namespace

ModelSpec describe_gemma4(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  refuse_parts_of_sisters(config);
  spec.tied_embeddings = config.boolean("tie_word_embeddings", true);
  spec.embedding_scale = std::sqrt(static_cast<double>(spec.hidden));
  spec.logit_cap = config.number("final_logit_softcapping", 0);
  if (spec.logit_cap < 0) config.wrong("final_logit_softcapping", "a number of at least 0");
  const std::vector<bool> full = read_full_layers(config, spec.layers.size());
  const FeedForwardSpec feed_forward = read_feed_forward(config);
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    GqaSpec gqa = read_heads(config, spec, i, full[i]);
    gqa.rope = read_rotation(config, full[i], gqa, spec);
    LayerSpec& layer = spec.layers[i];
    layer.mixer = gqa;
    layer.feed_forward = feed_forward;
    layer.residual = Residual::kBothNorms;
    layer.post_norm = "pre_feedforward_layernorm";
  }
  return spec;
}

namespace {

constexpr GgufName kGemma4Names[] = {
    {"post_attention_norm", "post_attention_layernorm"},
    {"ffn_norm", "pre_feedforward_layernorm"},
    {"post_ffw_norm", "post_feedforward_layernorm"},
    {"post_ffw_norm_1", "post_feedforward_layernorm_1"},
    {"post_ffw_norm_2", "post_feedforward_layernorm_2"},
    {"pre_ffw_norm_2", "pre_feedforward_layernorm_2"},
    {"ffn_gate_inp", "router.proj"},
    {"ffn_gate_inp.scale", "router.scale"},
    {"ffn_down_exps.scale", "router.per_expert_scale"},
    {"layer_output_scale.weight", "layer_scalar"},
};

// Rotations of both kinds: what add_rope() made of the file is that of layers that see all.
void nest_rotations(GgufFacts& facts, uint64_t head, uint64_t window_head) {
  Json& config = facts.config();
  const auto part = [](std::optional<uint64_t> rotated, uint64_t of) {
    return rotated && of > 0 ? static_cast<double>(*rotated) / static_cast<double>(of) : 1.0;
  };
  Json full = {{"rope_type", "default"}};
  if (config.contains("rope_scaling")) {
    full = std::move(config["rope_scaling"]);
    config.erase("rope_scaling");
  }
  full["rope_theta"] = std::move(config["rope_theta"]);
  full["partial_rotary_factor"] = part(facts.number("rope.dimension_count"), head);
  const double theta = facts.real("rope.freq_base_swa").value_or(10000);
  config["rope_parameters"] = {
      {"full_attention", std::move(full)},
      {"sliding_attention",
       {{"rope_type", "default"},
        {"rope_theta", theta},
        {"partial_rotary_factor", part(facts.number("rope.dimension_count_swa"), window_head)}}}};
  for (const char* key : {"rope_theta", "partial_rotary_factor"}) config.erase(key);
}

void complete_gemma4(GgufFacts& facts) {
  Json& config = facts.config();
  facts.add_if_absent("hidden_size_per_layer_input", 0);
  config["enable_moe_block"] = facts.known("num_experts") > 0;
  config["attention_bias"] = facts.in_any_layer("attn_q.bias") != nullptr;
  if (config.contains("num_experts_per_tok")) config["top_k_experts"] = config["num_experts_per_tok"];
  const std::vector<bool> windows = facts.flags("attention.sliding_window_pattern");
  for (const bool window : windows)
    config["layer_types"].push_back(window ? "sliding_attention" : "full_attention");
  const uint64_t layers = std::min<uint64_t>(facts.known("num_hidden_layers"), 10000),
                 head = facts.known("head_dim"),
                 window_head = facts.number("attention.key_length_swa").value_or(head);
  const std::vector<uint64_t> heads = facts.counts("attention.head_count_kv");
  for (uint64_t i = 0; i < layers; ++i) {
    const bool full = i < windows.size() ? !windows[i] : (i + 1) % 6 == 0 || i + 1 == layers;
    Json& own = config["per_layer_config"][text("{}", i)];
    own["head_dim"] = full ? head : window_head;
    if (i < heads.size()) own["num_key_value_heads"] = heads[i];
    if (full && facts.find(text("blk.{}.attn_v.weight", i)) == nullptr) config["attention_k_eq_v"] = true;
  }
  nest_rotations(facts, head, window_head);
}

}  // namespace

constinit const GgufFamily kGemma4Gguf = {
    .gguf = "gemma4",
    .model_type = "gemma4_text",
    .architecture = "Gemma4ForCausalLM",
    .names = kGemma4Names,
    .experts = "experts",
    .complete = complete_gemma4,
};

}  // namespace kt::inline models
