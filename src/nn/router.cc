#include "nn/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

namespace kt::inline nn {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// Takes the experts of all but the best groups out of the choice.
void keep_best_groups(const RouterSpec& spec, std::span<float> choice) {
  const size_t groups = static_cast<size_t>(spec.groups), size = choice.size() / groups;
  std::vector<float> scores(groups);
  for (size_t g = 0; g < groups; ++g) {
    float first = kNever, second = kNever;
    for (const float x : choice.subspan(g * size, size)) {
      second = std::max(second, std::min(first, x));
      first = std::max(first, x);
    }
    scores[g] = spec.group_score == RouterSpec::GroupScore::kMax ? first : first + (size > 1 ? second : 0);
  }
  std::vector<size_t> order(groups);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  for (size_t i = static_cast<size_t>(spec.top_groups); i < groups; ++i) {
    const auto group = choice.subspan(order[i] * size, size);
    std::fill(group.begin(), group.end(), kNever);
  }
}

// The top_k best, best first, and what they were chosen by: few of many numbers beat those found so far.
void keep_best(std::span<const float> choice, int top_k, int32_t* ids, float* best) {
  int count = 0;
  for (size_t e = 0; e < choice.size(); ++e) {
    const float x = std::isnan(choice[e]) ? kNever : choice[e];  // NaN compares with nothing
    if (count == top_k && x <= best[top_k - 1]) continue;
    int at = count < top_k ? count++ : top_k - 1;
    for (; at > 0 && x > best[at - 1]; --at) {
      best[at] = best[at - 1];
      ids[at] = ids[at - 1];
    }
    best[at] = x;
    ids[at] = static_cast<int32_t>(e);
  }
}

}  // namespace

void choose_experts(const RowKernels& rows, const RouterSpec& spec, int experts, int top_k,
                    const float* logits, const float* correction, int32_t* ids, float* weights) {
  std::vector<float> scores(logits, logits + experts);
  const auto score = [&](float* values, int count) {
    spec.score == RouterSpec::Score::kSigmoid ? rows.sigmoid(values, count) : rows.softmax(values, count);
  };
  if (!spec.score_of_chosen) score(scores.data(), experts);
  std::vector<float> choice = scores;
  if (correction)
    for (int e = 0; e < experts; ++e) choice[static_cast<size_t>(e)] += correction[e];
  if (spec.groups > 1) keep_best_groups(spec, choice);
  keep_best(choice, top_k, ids, weights);
  for (int i = 0; i < top_k; ++i) weights[i] = scores[static_cast<size_t>(ids[i])];
  if (spec.score_of_chosen) score(weights, top_k);
  if (spec.normalise) {
    const float sum =
        std::max(std::accumulate(weights, weights + top_k, 0.0f) + static_cast<float>(spec.normalise_floor),
                 static_cast<float>(spec.normalise_least));
    for (int i = 0; i < top_k; ++i) weights[i] /= sum;
  }
  for (int i = 0; i < top_k; ++i) weights[i] *= static_cast<float>(spec.scale);
}

void force_ids(std::span<const AttentionSequence> sequences, const float* forced, int top_k, int32_t* ids) {
  for (const AttentionSequence& sequence : sequences)
    for (int i = 0; i < sequence.count; ++i) {
      const int row = sequence.first + i;
      const float* const from = forced + int64_t{forced_round(sequence.position + i, row)} * top_k;
      for (int slot = 0; slot < top_k; ++slot)
        ids[int64_t{row} * top_k + slot] = static_cast<int32_t>(from[slot]);
    }
}

}  // namespace kt::inline nn
