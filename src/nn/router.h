// Which experts a token goes to, and how much each counts: from a layer's router logits.
#pragma once
#include <cstdint>
#include <span>

#include "kernels/row_ops.h"
#include "nn/kv_cache.h"

namespace kt::inline nn {

struct RouterSpec {
  enum class Score { kSoftmax, kSigmoid } score = Score::kSoftmax;
  bool score_of_chosen = false;    // choose by logits, then the scores of the chosen ones alone
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

// Where benchmarks name a token's experts (ChooseExperts::forced): which of their rows, for row `row` of a step at that
// position. A prime, so that the tokens of a prompt have rows of their own.
inline constexpr int kForcedRounds = 4099;
constexpr int forced_round(int position, int row) {
  return static_cast<int>((static_cast<int64_t>(position) + 97 * static_cast<int64_t>(row)) % kForcedRounds);
}
// Of all rows of a step; ids [rows, top_k].
void force_ids(std::span<const AttentionSequence> sequences, const float* forced, int top_k, int32_t* ids);

}  // namespace kt::inline nn
