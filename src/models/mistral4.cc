// Mistral Small 4: latent attention whose queries grow along the text, softmax routing within the best groups, shared
// experts, first layers dense where there are such.
#include "models/family.h"
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {

ModelSpec describe_mistral4(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  refuse_mlp_bias(config);
  if (config.has("sliding_window")) config.unsupported("sliding_window", "null");
  MlaSpec mla = read_mla(config);
  // The part that rotates is said of a whole head, and told by its size as well.
  const int head = mla.nope + mla.rotated;
  mla.rope = read_rope(config, {.dims = head, .part = static_cast<double>(mla.rotated) / head}, spec);
  if (mla.rope.dims != mla.rotated)
    fail("{} is {}, but {} of {} numbers of a head turn", config.place("qk_rope_head_dim"), mla.rotated,
         mla.rope.dims, head);
  mla.rope.interleaved = config.boolean("rope_interleave", true);
  mla.growth = read_query_growth(config);
  scale_softmax_for_rope(config, mla);
  MoeSpec moe = read_experts(config, {.experts = "n_routed_experts"});
  require_word(config, "scoring_func", "softmax");
  read_groups(config, moe);
  moe.router.group_score = RouterSpec::GroupScore::kTopTwo;
  moe.router.normalise = config.boolean("norm_topk_prob", true);
  moe.router.normalise_floor = 1e-20;
  moe.router.scale = config.number("routed_scaling_factor", 1);
  read_shared_experts(config, moe);
  fill_layers(config, mla, moe, spec);
  return spec;
}

namespace {

void complete_mistral4(GgufFacts& facts) {
  Json& config = facts.config();
  facts.add_dense_layers(GgufFacts::DenseLayers::kCounted);
  facts.add_if_absent("norm_topk_prob", false);
  facts.add_if_absent("routed_scaling_factor", 1.0);
  // The public converter leaves out how queries grow, which all published models do alike.
  constexpr const char* kGrowth = "llama_4_scaling_beta";
  config["rope_scaling"][kGrowth] = config.value(kGrowth, Json(0.1));
  config.erase(kGrowth);
}

}  // namespace

constinit const GgufFamily kMistral4Gguf = {
    .gguf = "mistral4",
    .model_type = "mistral4",
    .architecture = "Mistral4ForCausalLM",
    .expert_count = "n_routed_experts",
    .complete = complete_mistral4,
};

}  // namespace kt::inline models
