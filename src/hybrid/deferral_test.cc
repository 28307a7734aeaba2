#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>

#include "base/error.h"
#include "hybrid/expert_layer.h"

namespace kt::inline hybrid {
namespace {

using ::testing::ElementsAre;

struct Split {
  std::vector<int64_t> now, later;
};

Split split(const std::vector<int64_t>& ids, const std::vector<float>& weights, int top_k, int max_deferred,
            int experts = 8) {
  Split out{std::vector<int64_t>(ids.size(), -7), std::vector<int64_t>(ids.size(), -7)};
  split_deferred(ids, weights, top_k, max_deferred, experts, out.now, out.later);
  return out;
}

TEST(SplitDeferred, KeepsTheHeaviestOfEachToken) {
  const Split s = split({3, 5, 1}, {0.2f, 0.1f, 0.7f}, 3, 1);
  EXPECT_THAT(s.now, ElementsAre(3, -1, 1));
  EXPECT_THAT(s.later, ElementsAre(-1, 5, -1));
}

TEST(SplitDeferred, WhatOneTokenProtectsIsNotDeferredForAnother) {
  // Expert 5 is the light one of the first token and the heavy one of the second.
  const Split s = split({3, 5, 5, 2}, {0.9f, 0.1f, 0.8f, 0.2f}, 2, 1);
  EXPECT_THAT(s.now, ElementsAre(3, 5, 5, -1));
  EXPECT_THAT(s.later, ElementsAre(-1, -1, -1, 2));
}

TEST(SplitDeferred, TiesGoToTheEarlierSlot) {
  const Split s = split({4, 2, 6}, {0.5f, 0.5f, 0.5f}, 3, 2);
  EXPECT_THAT(s.now, ElementsAre(4, -1, -1));
  EXPECT_THAT(s.later, ElementsAre(-1, 2, 6));
}

TEST(SplitDeferred, IdsThatDoNotExistAreInNeitherAndProtectNothing) {
  const Split s = split({-1, 8, 2, 3}, {0.9f, 0.8f, 0.2f, 0.1f}, 4, 2);
  EXPECT_THAT(s.now, ElementsAre(-1, -1, -1, -1));
  EXPECT_THAT(s.later, ElementsAre(-1, -1, 2, 3));
}

TEST(SplitDeferred, NoneAndAll) {
  const std::vector<int64_t> ids{1, 2, 3, 4};
  const std::vector<float> weights{0.1f, 0.2f, 0.3f, 0.4f};
  EXPECT_EQ(split(ids, weights, 2, 0).now, ids);
  EXPECT_EQ(split(ids, weights, 2, 2).later, ids);
  EXPECT_EQ(split(ids, weights, 2, 9).later, ids);
  EXPECT_TRUE(split({}, {}, 2, 1).now.empty());
}

TEST(SplitDeferred, NanIsLighterThanAll) {
  const float nan = std::nanf("");
  const Split s = split({1, 2, 3}, {nan, -0.5f, nan}, 3, 2);
  EXPECT_THAT(s.now, ElementsAre(-1, 2, -1));
}

TEST(SplitDeferred, SizesThatDoNotFitAreErrors) {
  EXPECT_THROW(split({1, 2, 3}, {1, 1, 1}, 2, 1), Error);
  EXPECT_THROW(split({1, 2}, {1}, 2, 1), Error);
  EXPECT_THROW(split({1, 2}, {1, 1}, 0, 1), Error);
}

// The definition, one pair at a time.
TEST(SplitDeferred, AgreesWithTheDefinition) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const int tokens = 1 + static_cast<int>(random() % 5), top_k = 1 + static_cast<int>(random() % 6),
              deferred = static_cast<int>(random() % 7), experts = 10;
    std::vector<int64_t> ids;
    std::vector<float> weights;
    for (int i = 0; i < tokens * top_k; ++i) {
      ids.push_back(static_cast<int64_t>(random() % 12) - 1);
      weights.push_back(static_cast<float>(random() % 5));
    }
    std::set<int64_t> kept;
    for (int t = 0; t < tokens; ++t)
      for (int a = 0; a < top_k; ++a) {
        int heavier = 0;
        for (int b = 0; b < top_k; ++b) {
          const float x = weights[t * top_k + a], y = weights[t * top_k + b];
          heavier += y > x || (y == x && b < a);
        }
        if (heavier < top_k - deferred) kept.insert(ids[t * top_k + a]);
      }
    const Split s = split(ids, weights, top_k, deferred, experts);
    for (size_t i = 0; i < ids.size(); ++i) {
      const bool exists = ids[i] >= 0 && ids[i] < experts, now = kept.contains(ids[i]);
      EXPECT_EQ(s.now[i], exists && now ? ids[i] : -1);
      EXPECT_EQ(s.later[i], exists && !now ? ids[i] : -1);
    }
  }
}

}  // namespace
}  // namespace kt::inline hybrid
