#include "models/expert_use.h"

#include <gtest/gtest.h>

#include <cmath>

namespace kt::inline models {
namespace {

// Two layers of 16 experts, two for each token.
class ExpertUseTest : public testing::Test {
 protected:
  ExpertCounts counts{{1, 2}, 16, 2};
  std::vector<uint64_t> before = counts.snapshot();

  void route(size_t layer, std::initializer_list<int32_t> ids) {
    counts.chose(layer, std::vector<int32_t>(ids));
  }
  std::optional<ExpertUse> use() { return expert_use(counts, before, counts.snapshot()); }
};

TEST_F(ExpertUseTest, NothingRouted) {
  route(0, {3, 4});
  before = counts.snapshot();
  EXPECT_FALSE(use());
}

TEST_F(ExpertUseTest, IsTheMeanOfLayersSinceTheSnapshot) {
  route(0, {15, 14});
  before = counts.snapshot();
  for (int32_t i = 0; i < 16; ++i) route(0, {i, (i + 1) % 16});
  for (int32_t i = 0; i < 16; ++i) route(1, {0, 1});
  const auto got = use();
  ASSERT_TRUE(got);
  EXPECT_EQ(got->experts, 16);
  EXPECT_DOUBLE_EQ(got->tokens, 16);
  EXPECT_DOUBLE_EQ(got->distinct, (16 + 2) / 2.0);
  EXPECT_DOUBLE_EQ(got->busiest, (0.5 + 1) / 2);
  EXPECT_NEAR(got->even, 16 * (1 - std::pow(1 - 2 / 16.0, 16)), 1e-9);
  EXPECT_FALSE(got->narrow());
}

TEST_F(ExpertUseTest, FewOfManyAreNarrow) {
  for (int i = 0; i < 40; ++i)
    for (size_t layer : {0, 1}) route(layer, {i % 3, 5});
  EXPECT_DOUBLE_EQ(use()->distinct, 4);
  EXPECT_TRUE(use()->narrow());
}

TEST_F(ExpertUseTest, OneTokenIsNot) {
  route(0, {1, 2});
  EXPECT_DOUBLE_EQ(use()->distinct, 2);  // of the one layer that routed
  EXPECT_DOUBLE_EQ(use()->busiest, 1);
  EXPECT_FALSE(use()->narrow());
}

}  // namespace
}  // namespace kt::inline models
