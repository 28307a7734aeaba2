// Which routed experts rules put on a GPU: all of a layer, single ones, or as many as `gpu_experts` says. The experts'
// home is the host's memory in any case, and a GPU has copies.
#pragma once
#include <string>
#include <vector>

#include "models/expert_order.h"
#include "models/rule_matches.h"

namespace kt::inline models {

// The routed experts of a layer, as rules have them.
struct RuledLayer {
  size_t module = 0;              // them, among the tree's
  int rule = RuleMatches::kNone;  // that decides them as a whole
  bool on_gpu = false;            // as a whole
  bool layer_on_cpu = false;      // a rule says so of the layer's dense half
  struct Single {
    int expert = 0, rule = 0;
    bool on_gpu = false;
  };
  std::vector<Single> singles = {};  // that rules of their own put elsewhere than the others
};

// Layers that one rule decides are together. Error(kInput), at the rule's place: a number, a share or ids that there
// are not, copies of what lies on a GPU, copies beside a layer on the CPU.
std::vector<ExpertRule> expert_rules(const RuleFile& file, const ModuleTree& tree,
                                     const std::vector<RuledLayer>& layers);

// "rule 4, line 26", "`place` 2".
std::string rule_and_line(const Rule& rule);

}  // namespace kt::inline models
