// Orders of placement and how many experts are wanted. That masks are Python's is tests/placement_test.py's.
#include "models/expert_order.h"

#include <gtest/gtest.h>

#include "base/testing/error_of.h"

namespace kt::inline models {
namespace {

std::vector<std::pair<int, int>> order(ExpertStrategy strategy, const ExpertOrderInput& input) {
  std::vector<std::pair<int, int>> out;
  for (const auto& [layer, expert] : expert_order(strategy, input)) out.emplace_back(layer, expert);
  return out;
}

using Pairs = std::vector<std::pair<int, int>>;

TEST(ExpertOrder, UniformGoesRoundTheLayersThatRoute) {
  EXPECT_EQ(order(ExpertStrategy::kUniform, {.experts = {0, 2, 2}}), (Pairs{{1, 0}, {2, 0}, {1, 1}, {2, 1}}));
}

TEST(ExpertOrder, FrontLoadingFillsLayers) {
  EXPECT_EQ(order(ExpertStrategy::kFrontLoading, {.experts = {2, 0, 2}}),
            (Pairs{{0, 0}, {0, 1}, {2, 0}, {2, 1}}));
}

// Equal counts keep their order; what a layer that does not route has counted is nobody's.
TEST(ExpertOrder, FrequencyFollowsCounts) {
  const ExpertStatistics counts{.layers = 3, .experts = 2, .counts = {99, 99, 3, 7, 7, 3}};
  EXPECT_EQ(order(ExpertStrategy::kFrequency, {.experts = {0, 2, 2}, .statistics = &counts}),
            (Pairs{{1, 1}, {2, 0}, {1, 0}, {2, 1}}));
}

// torch.randperm(10, generator=torch.Generator().manual_seed(42)) is 2 6 1 8 4 5 0 9 3 7.
TEST(ExpertOrder, RandomIsTorchsPermutation) {
  EXPECT_EQ(order(ExpertStrategy::kRandom, {.experts = {5, 5}}),
            (Pairs{{0, 2}, {1, 1}, {0, 1}, {1, 3}, {0, 4}, {1, 0}, {0, 0}, {1, 4}, {0, 3}, {1, 2}}));
  EXPECT_NE(order(ExpertStrategy::kRandom, {.experts = {5, 5}, .seed = 43}),
            order(ExpertStrategy::kRandom, {.experts = {5, 5}}));
  EXPECT_TRUE(order(ExpertStrategy::kRandom, {.experts = {0, 0}}).empty());
}

TEST(ExpertOrder, StatisticsHaveToBeThoseOfTheModel) {
  const auto refusal = [](const ExpertOrderInput& input) {
    return error_of([&] { expert_order(ExpertStrategy::kFrequency, input); });
  };
  EXPECT_EQ(refusal({.experts = {2, 2}}),
            "the placement by frequency needs statistics: `expert_statistics` names a file of them");
  const ExpertStatistics other{.layers = 3, .experts = 4, .counts = std::vector<int64_t>(12)};
  EXPECT_EQ(refusal({.experts = {2, 2}, .statistics = &other}),
            "statistics of 3 layers with 4 experts, the model has 2 with 2");
}

TEST(ExpertOrder, StrategiesAreNamed) {
  for (const ExpertStrategy each : {ExpertStrategy::kUniform, ExpertStrategy::kFrequency,
                                    ExpertStrategy::kFrontLoading, ExpertStrategy::kRandom})
    EXPECT_EQ(expert_strategy_named(name_of(each)), each);
  EXPECT_EQ(error_of([] { expert_strategy_named("best"); }),
            "unknown placement strategy 'best'; there are uniform, frequency, front-loading, random");
}

TEST(ExpertWish, IsReadAndCounted) {
  const auto total = [](const char* value, int64_t layers, int64_t experts) {
    return parse_expert_wish(value, "gpu_experts").total(layers, experts);
  };
  EXPECT_EQ(total("auto", 48, 48 * 128), std::nullopt);
  EXPECT_EQ(total("8", 48, 48 * 128), 384);
  EXPECT_EQ(total("0", 48, 48 * 128), 0);
  EXPECT_EQ(total("500", 48, 48 * 128), 48 * 128);
  EXPECT_EQ(total("25%", 48, 48 * 128), 12 * 128);
  EXPECT_EQ(total("0.1%", 3, 3 * 256), 0);
  EXPECT_EQ(total("100%", 3, 3 * 256), 768);
  EXPECT_EQ(total("8", 0, 0), 0);
  EXPECT_EQ(text_of(parse_expert_wish("12.5%", "x")), "12.5%");
  EXPECT_EQ(text_of(parse_expert_wish("12", "x")), "12 a layer");
  EXPECT_EQ(text_of(parse_expert_wish("auto", "x")), "auto");
  for (const char* bad : {"", "%", "-1", "1.5", "101%", "-1%", "nan%", "8x", "all", "99999999999"})
    EXPECT_EQ(
        error_of([&] { parse_expert_wish(bad, "gpu_experts"); }),
        text("gpu_experts: expected auto, experts a layer such as 8, or a share such as 25%, got '{}'", bad));
}

}  // namespace
}  // namespace kt::inline models
