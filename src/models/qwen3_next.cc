// Qwen3-Next and Qwen3-Coder-Next: three layers of the gated delta rule to one of gated attention, experts as
// Qwen2-MoE's.
#include "models/delta_gguf.h"
#include "models/family.h"

namespace kt::inline models {
namespace {

// Said by what reads GGUF files alone: newer ones have gates apart, and heads one after the other.
constexpr std::string_view kApart = "linear_gates_apart";

void complete_qwen3_next(GgufFacts& facts) {
  complete_delta(facts);
  facts.config()[std::string(kApart)] = facts.in_any_layer("attn_gate.weight") != nullptr;
  facts.add_dense_layers(GgufFacts::DenseLayers::kListed);
}

}  // namespace

constinit const GgufFamily kQwen3NextGguf = {
    .gguf = "qwen3next",
    .model_type = "qwen3_next",
    .architecture = "Qwen3NextForCausalLM",
    .names = kDeltaGgufNames,
    .complete = complete_qwen3_next,
};

ModelSpec describe_qwen3_next(const ConfigReader& config) {
  ModelSpec spec = describe_common(config, 1e-6);
  MoeSpec moe = read_experts(config, {.experts = "num_experts"});
  moe.router.normalise = config.boolean("norm_topk_prob", true);
  moe.shared_inter = config.integer("shared_expert_intermediate_size");
  moe.shared_gate = true;
  moe.names.shared = "mlp.shared_expert";
  fill_layers(config, {}, moe, spec);
  DeltaSpec::Names names;
  if (!config.boolean(kApart, false)) {
    names.joined = "linear_attn.in_proj_qkvz";
    names.gates.clear();
  }
  names.b = "linear_attn.in_proj_ba";
  names.a.clear();
  read_delta_layers(config, names, spec);
  return spec;
}

}  // namespace kt::inline models
