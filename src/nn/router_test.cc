#include "nn/router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/table.h"

namespace kt::inline nn {
namespace {

using testing::ElementsAre;

struct Choice {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Choice choose(const RouterSpec& spec, const std::vector<float>& logits, int top_k,
              const std::vector<float>& correction = {}) {
  Choice out{std::vector<int32_t>(static_cast<size_t>(top_k)),
             std::vector<float>(static_cast<size_t>(top_k))};
  choose_experts(*best_kernels().rows, spec, static_cast<int>(logits.size()), top_k, logits.data(),
                 correction.empty() ? nullptr : correction.data(), out.ids.data(), out.weights.data());
  return out;
}

TEST(Router, SoftmaxWithAndWithoutNormalising) {
  const std::vector<float> logits = {std::log(1.0f), std::log(5.0f), std::log(2.0f), std::log(2.0f)};
  const Choice plain = choose({}, logits, 2);
  EXPECT_THAT(plain.ids, ElementsAre(1, 2));  // equal scores: the lower id
  EXPECT_NEAR(plain.weights[0], 0.5, 1e-6);
  EXPECT_NEAR(plain.weights[1], 0.2, 1e-6);
  const Choice normal = choose({.normalise = true, .scale = 3}, logits, 2);
  EXPECT_NEAR(normal.weights[0], 3 * 5.0 / 7, 1e-5);
  const Choice chosen = choose({.score_of_chosen = true}, logits, 2);
  EXPECT_NEAR(chosen.weights[1], 2.0 / 7, 1e-6);
}

TEST(Router, ASumOfAlmostNothingHasALeast) {
  // The correction sends the token to experts that have next to no score.
  const std::vector<float> logits = {80, 0, 0}, correction = {-2, 0, 0};
  const float score = std::exp(-80.0f);
  const Choice free = choose({.normalise = true}, logits, 2, correction);
  EXPECT_NEAR(free.weights[0], 0.5, 1e-6);
  const Choice held = choose({.normalise = true, .normalise_least = 1e-12}, logits, 2, correction);
  EXPECT_THAT(held.ids, ElementsAre(1, 2));
  EXPECT_NEAR(held.weights[0] / (score / 1e-12f), 1, 1e-5);
}

TEST(Router, SigmoidChoosesWithTheCorrectionAndWeighsWithout) {
  const RouterSpec spec{.score = RouterSpec::Score::kSigmoid, .correction_bias = true};
  const Choice choice = choose(spec, {0, 1, -1}, 1, {0, 0, 5});
  EXPECT_THAT(choice.ids, ElementsAre(2));
  EXPECT_NEAR(choice.weights[0], 1 / (1 + std::exp(1.0)), 1e-6);
}

// Scores that are 1 in f32, both: the logits tell which is more.
TEST(Router, SigmoidOfTheChosenAlone) {
  const RouterSpec spec{.score = RouterSpec::Score::kSigmoid, .score_of_chosen = true};
  const Choice choice = choose(spec, {30, -1, 40, 1}, 3);
  EXPECT_THAT(choice.ids, ElementsAre(2, 0, 3));
  EXPECT_EQ(choice.weights[1], 1);
  EXPECT_NEAR(choice.weights[2], 1 / (1 + std::exp(-1.0)), 1e-6);
}

TEST(Router, Groups) {
  // Group 1 has the best single expert, group 0 the best pair.
  const std::vector<float> logits = {2, 1.9f, 3, -9, 0, 0};
  RouterSpec spec{.groups = 3, .top_groups = 1, .group_score = RouterSpec::GroupScore::kMax};
  EXPECT_THAT(choose(spec, logits, 2).ids, ElementsAre(2, 3));
  spec.group_score = RouterSpec::GroupScore::kTopTwo;
  spec.score = RouterSpec::Score::kSigmoid;
  EXPECT_THAT(choose(spec, logits, 2).ids, ElementsAre(0, 1));
}

TEST(Router, NanStaysInRange) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const int32_t id : choose({}, {nan, nan, 1, nan}, 3).ids) {
    EXPECT_GE(id, 0);
    EXPECT_LT(id, 4);
  }
}

}  // namespace
}  // namespace kt::inline nn
