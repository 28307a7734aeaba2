#include "nn/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

namespace kt {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void softmax(std::span<float> x) {
  const float top = *std::max_element(x.begin(), x.end());
  float sum = 0;
  for (float& v : x) sum += v = std::exp(v - top);
  for (float& v : x) v /= sum;
}

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

}  // namespace

void choose_experts(const RouterSpec& spec, int experts, int top_k, const float* logits,
                    const float* correction, int32_t* ids, float* weights) {
  std::vector<float> scores(logits, logits + experts);
  if (spec.score == RouterSpec::Score::kSigmoid) {
    for (float& x : scores) x = 1 / (1 + std::exp(-x));
  } else if (!spec.softmax_of_chosen) {
    softmax(scores);
  }
  std::vector<float> choice = scores;
  if (correction)
    for (int e = 0; e < experts; ++e) choice[static_cast<size_t>(e)] += correction[e];
  if (spec.groups > 1) keep_best_groups(spec, choice);
  std::vector<int32_t> order(static_cast<size_t>(experts));
  std::iota(order.begin(), order.end(), 0);
  // NaN compares with nothing: a strict order needs it to be something.
  const auto rank = [&](int32_t e) {
    const float x = choice[static_cast<size_t>(e)];
    return x == x ? x : kNever;
  };
  std::partial_sort(order.begin(), order.begin() + top_k, order.end(),
                    [&](int32_t a, int32_t b) { return rank(a) != rank(b) ? rank(a) > rank(b) : a < b; });
  for (int i = 0; i < top_k; ++i) {
    ids[i] = order[static_cast<size_t>(i)];
    weights[i] = scores[static_cast<size_t>(ids[i])];
  }
  if (spec.softmax_of_chosen) softmax({weights, static_cast<size_t>(top_k)});
  if (spec.normalise) {
    const float sum =
        std::max(std::accumulate(weights, weights + top_k, 0.0f) + static_cast<float>(spec.normalise_floor),
                 static_cast<float>(spec.normalise_least));
    for (int i = 0; i < top_k; ++i) weights[i] /= sum;
  }
  for (int i = 0; i < top_k; ++i) weights[i] *= static_cast<float>(spec.scale);
}

}  // namespace kt
