// Experts that a benchmark sends tokens to in place of those its router chose: a random model's router shows no real
// model's habits. Which ones follows from the seed, the layer, the position and the row, wherever the model runs.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "models/spec.h"
#include "weights/expert_statistics.h"

namespace kt::inline models {

struct ForcedRouting {
  double exponent =
      0;  // of Zipf's law: the r-th of a layer's experts has r^-exponent of the weight; 0: all alike
  uint64_t seed = 1;

  // "uniform" or "zipf:S", S from 0 to 10. Throws an Error that says so.
  static ForcedRouting parse(std::string_view value);
  std::string describe() const;
};

// [kForcedRounds, top_k], each row without an expert twice. Which of a layer's experts are the popular ones differs
// from layer to layer.
std::vector<float> forced_ids(const ForcedRouting& routing, int layer, int experts, int top_k);

// How often each expert will be chosen, of all layers: what a run with such routing would have counted.
ExpertStatistics forced_statistics(const ForcedRouting& routing, const ModelSpec& spec);

}  // namespace kt::inline models
