// How tokens spread over experts: what a figure of speed must say, because experts that are chosen again and again
// come from a cache.
#pragma once
#include <cstdint>
#include <optional>
#include <span>

#include "models/expert_counts.h"

namespace kt::inline models {

inline constexpr int kBusiest = 8;

// Of the layers that route, on average.
struct ExpertUse {
  int experts = 0;      // of a layer
  double tokens = 0;    // routed
  double distinct = 0;  // experts that got a token
  double busiest = 0;   // the share of all choices that went to the kBusiest busiest experts
  double even = 0;      // distinct experts where each token chooses among all alike

  // Half as many as even routing would reach and fewer: no model that was trained, and no figure of its speed.
  bool narrow() const { return 2 * distinct < even; }
};

// Of what was counted between two snapshots; nothing where no token was routed.
std::optional<ExpertUse> expert_use(const ExpertCounts& counts, std::span<const uint64_t> before,
                                    std::span<const uint64_t> after);
// Of all that was counted.
std::optional<ExpertUse> expert_use(const ExpertCounts& counts);

}  // namespace kt::inline models
