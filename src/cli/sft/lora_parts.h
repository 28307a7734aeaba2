// Which matrices of a model get LoRA, and how many parameters that makes: from the model's description alone.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "models/module_tree.h"

namespace kt::inline cli {

// A matrix that may have LoRA; of routed experts those of a layer together, gate and up as one.
struct LoraMatrix {
  std::string name;                     // "model.layers.3.mlp.experts.gate_up_proj"
  std::vector<std::string> other = {};  // names that mean it as well: ....gate_proj, ....up_proj
  ModulePart part = ModulePart::kAttention;
  int layer = 0;
  int64_t n = 0, k = 0, count = 1;  // count: of experts

  uint64_t weights() const { return static_cast<uint64_t>(n * k * count); }
  uint64_t trainable(int64_t rank) const { return static_cast<uint64_t>((n + k) * count * rank); }
};

// Those of attention, routed experts, shared experts and dense MLPs.
std::vector<LoraMatrix> lora_matrices(const ModelSpec& spec, const ModuleTree& tree);

// Those that `words` name: "all", "all_attention", or components of names: q_proj, experts, shared_experts.gate_proj,
// in any family's spelling. Error beginning with `place` for a word that names none, with the nearest that does.
std::vector<LoraMatrix> chosen_matrices(std::vector<LoraMatrix> all, const std::vector<std::string>& words,
                                        const std::string& place);

struct LoraPart {
  ModulePart part = ModulePart::kAttention;
  int64_t matrices = 0;
  uint64_t weights = 0, trainable = 0;
};
// By part, in the order of a layer.
std::vector<LoraPart> count_lora(const std::vector<LoraMatrix>& chosen, int64_t rank);

}  // namespace kt::inline cli
