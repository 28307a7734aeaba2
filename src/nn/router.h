// Which experts a token goes to, and how much each counts: from a layer's router logits.
#pragma once
#include <cstdint>

#include "kernels/row_ops.h"

namespace kt {

struct RouterSpec {
  enum class Score { kSoftmax, kSigmoid } score = Score::kSoftmax;
  bool softmax_of_chosen = false;  // choose by logits, then softmax over the chosen ones
  bool normalise = false;          // chosen weights are divided by their sum
  double normalise_floor = 0;      // added to that sum
  double normalise_least = 0;      // that sum is no less
  double scale = 1;                // of the weights, last
  int groups = 1, top_groups = 1;  // experts outside the best groups are not chosen
  enum class GroupScore { kMax, kTopTwo } group_score = GroupScore::kMax;
  bool correction_bias = false;  // added to the scores for choosing only
  bool bias = false;             // of the projection itself
};

// One token: logits [experts] and the correction bias [experts] (null: none) to ids and weights [top_k], best
// first; equal scores go to the lower id. NaN logits choose nothing sensible but stay in range.
void choose_experts(const RowKernels& rows, const RouterSpec& spec, int experts, int top_k,
                    const float* logits, const float* correction, int32_t* ids, float* weights);

}  // namespace kt
