// How tokens spread over experts, in words of reports.
#pragma once
#include <string>

#include "base/text.h"
#include "models/expert_use.h"
#include "terminal/report.h"

namespace kt::inline cli {

// "118.0 of 128"
inline std::string experts_used_text(const ExpertUse& use) {
  return text("{} of {}", fixed(use.distinct, 1), use.experts);
}

// "a layer used 118.0 of 128 experts, the busiest 8 for 12 % of all choices"
inline std::string experts_text(const ExpertUse& use) {
  return text("a layer used {} experts, the busiest {} for {} of all choices", experts_used_text(use),
              kBusiest, percent(use.busiest));
}

}  // namespace kt::inline cli
