// What arguments of matching rules mean beyond a device and a format: refused where the engine cannot do it yet, said
// where it has no meaning here.
#pragma once
#include <string>
#include <vector>

#include "models/rule_matches.h"

namespace kt::inline models {

// Lines to say; Error(kUnsupported), at the rule's place, for what is not there yet, Error(kInput) for words that mean
// nothing.
std::vector<std::string> checked_arguments(const RuleFile& file, const ModuleTree& tree,
                                           const RuleMatches& matches);

}  // namespace kt::inline models
