// SmallThinker: routers read what a layer gets, before attention, and experts are gated by ReLU; which layers see a
// window and which rotate is listed.
#include <algorithm>

#include "models/family.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {
namespace {

// Parts that configs name and published models do not have.
void refuse_other_parts(const ConfigReader& config) {
  require_word(config, "hidden_act", "relu");
  require_flag(config, "use_qk_norm", false);
  require_flag(config, "moe_enable_early_router", true);
  require_flag(config, "moe_enable_secondary_experts", false);
  if (config.integer("moe_shared_primary_experts", 0) != 0)
    config.unsupported("moe_shared_primary_experts", "0");
}

MoeSpec read_primary_experts(const ConfigReader& config) {
  MoeSpec moe = read_experts(config, {.experts = "moe_num_primary_experts",
                                      .inter = "moe_ffn_hidden_size",
                                      .top_k = "moe_num_active_primary_experts"});
  moe.activation = {.kind = ActivationKind::kRelu};
  const bool softmax = config.boolean("moe_primary_router_apply_softmax", false);
  const std::string_view score = softmax ? "softmax" : "sigmoid";
  require_word(config, "scoring_func", score);
  moe.router.score = softmax ? RouterSpec::Score::kSoftmax : RouterSpec::Score::kSigmoid;
  moe.router.score_of_chosen = true;
  moe.router.normalise = !softmax;  // which is of the chosen alone
  moe.routes_first = true;
  moe.names.router = "block_sparse_moe.primary_router";
  return moe;
}

}  // namespace

ModelSpec describe_smallthinker(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  spec.tied_embeddings = config.boolean("tie_word_embeddings", true);
  refuse_other_parts(config);
  const size_t layers = spec.layers.size();
  const std::vector<bool> routing = read_layer_flags(config, "moe_layer_layout", layers);
  if (std::ranges::find(routing, false) != routing.end())
    config.unsupported("moe_layer_layout", "1 for every layer");
  GqaSpec gqa = read_gqa(config, spec);
  const RopeSpec rope = read_rope(config, {.dims = gqa.head_dim, .theta = 1e6}, spec);
  const MoeSpec moe = read_primary_experts(config);
  const std::vector<bool> rotates = read_layer_flags(config, "rope_layout", layers),
                          windows = read_layer_flags(config, "sliding_window_layout", layers);
  if (rotates.empty()) config.missing("rope_layout");
  for (size_t i = 0; i < layers; ++i) {
    gqa.rope = rotates[i] ? rope : RopeSpec{};
    gqa.window = !windows.empty() && windows[i] ? config.integer("sliding_window_size", 4096, 1) : 0;
    spec.layers[i].mixer = gqa;
    spec.layers[i].feed_forward = moe;
  }
  return spec;
}

namespace {

constexpr GgufName kSmallThinkerNames[] = {{"ffn_gate_inp", "block_sparse_moe.primary_router"}};

// Layouts are not in files: with a window, every fourth layer from the first on sees all and does not rotate; without,
// all layers rotate.
void complete_smallthinker(GgufFacts& facts) {
  Json& config = facts.config();
  const auto rename = [&](const char* usual, const char* word) {
    if (!config.contains(usual)) return;
    Json value = std::move(config[usual]);
    config.erase(usual);
    config[word] = std::move(value);
  };
  rename("moe_intermediate_size", "moe_ffn_hidden_size");
  rename("num_experts_per_tok", "moe_num_active_primary_experts");
  config["moe_primary_router_apply_softmax"] = config.value("scoring_func", "") == "softmax";
  const uint64_t window = facts.known("sliding_window");
  rename("sliding_window", "sliding_window_size");
  for (uint64_t i = 0; i < std::min<uint64_t>(facts.known("num_hidden_layers"), 10000); ++i) {
    const bool far = window > 0 && i % 4 == 0;
    config["rope_layout"].push_back(far ? 0 : 1);
    config["sliding_window_layout"].push_back(window > 0 && !far ? 1 : 0);
  }
}

}  // namespace

constinit const GgufFamily kSmallThinkerGguf = {
    .gguf = "smallthinker",
    .model_type = "smallthinker",
    .architecture = "SmallThinkerForCausalLM",
    .names = kSmallThinkerNames,
    .experts = "block_sparse_moe.experts",
    .projections = {"gate", "up", "down"},
    .expert_count = "moe_num_primary_experts",
    .complete = complete_smallthinker,
};

}  // namespace kt::inline models
