// Which rule decides which module: depth first from the root, for each module the first rule of the file that matches
// it; a rule with recursive false ends the walk below. Rules are not merged, and nothing is inherited.
#pragma once
#include <string>
#include <vector>

#include "models/module_tree.h"
#include "models/operators.h"
#include "models/rules.h"

namespace kt::inline models {

struct RuleMatches {
  static constexpr int kNone = -1;   // no rule matches
  static constexpr int kBelow = -2;  // below a module whose rule is not recursive: not looked at

  std::vector<int> rule =
      {};  // of each module of the tree: an index of the file's rules, or one of the above
  std::vector<OperatorUse> uses = {};  // of each rule
  struct Idle {
    int rule = 0;     // an index
    std::string why;  // "matches no module", "names only what rule 3 took", ...
  };
  std::vector<Idle> idle = {};          // rules that decide nothing, in the file's order
  std::vector<std::string> notes = {};  // what else a person should know, a line each
};

// Errors: as operator_use(), of any rule; a pattern that takes too many steps, naming rule and module; rules of which
// none matches.
RuleMatches match_rules(const RuleFile& file, const ModuleTree& tree);

}  // namespace kt::inline models
