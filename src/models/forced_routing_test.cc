#include "models/forced_routing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.h"
#include "nn/router.h"

namespace kt::inline models {
namespace {

TEST(ForcedRouting, SaysWhatItTakes) {
  EXPECT_EQ(ForcedRouting::parse("uniform").exponent, 0);
  EXPECT_EQ(ForcedRouting::parse("zipf:1.25").exponent, 1.25);
  EXPECT_EQ(ForcedRouting::parse("zipf:0").describe(), "uniform");
  for (const char* value :
       {"", "zipf", "zipf:", "zipf:x", "zipf:-1", "zipf:11", "zipf:nan", "zipf:1 ", "even"})
    EXPECT_THROW(ForcedRouting::parse(value), Error) << value;
}

// How often each expert is among the chosen, most popular first.
std::vector<double> shares(const ForcedRouting& routing, int experts, int top_k,
                           std::vector<int>* order = nullptr) {
  std::vector<int> counts(static_cast<size_t>(experts));
  const std::vector<float> ids = forced_ids(routing, 3, experts, top_k);
  EXPECT_EQ(ids.size(), static_cast<size_t>(kForcedRounds * top_k));
  for (size_t i = 0; i < ids.size(); i += static_cast<size_t>(top_k)) {
    const std::set<float> row(ids.begin() + static_cast<int64_t>(i),
                              ids.begin() + static_cast<int64_t>(i) + top_k);
    EXPECT_EQ(row.size(), static_cast<size_t>(top_k));
    for (const float id : row) ++counts.at(static_cast<size_t>(id));
  }
  if (order) *order = counts;
  std::vector<double> out;
  for (const int count : counts) out.push_back(static_cast<double>(count) / kForcedRounds);
  std::sort(out.rbegin(), out.rend());
  return out;
}

TEST(ForcedRouting, FollowsZipfsLaw) {
  const std::vector<double> even = shares({}, 64, 8);
  EXPECT_NEAR(even.front(), 8.0 / 64, 0.02);
  EXPECT_NEAR(even.back(), 8.0 / 64, 0.02);
  // One expert at a time is drawn by the law itself.
  const std::vector<double> zipf = shares({.exponent = 1}, 64, 1);
  double harmonic = 0;
  for (int r = 1; r <= 64; ++r) harmonic += 1.0 / r;
  for (const int r : {1, 2, 4, 16})
    EXPECT_NEAR(zipf[static_cast<size_t>(r - 1)], 1 / harmonic / r, 0.02) << r;
}

TEST(ForcedRouting, StatisticsNameThePopular) {
  ModelSpec spec;
  spec.layers.resize(5);
  for (const size_t layer : {3, 4}) spec.layers[layer].feed_forward = MoeSpec{.experts = 32};
  const ForcedRouting routing{.exponent = 1};
  const ExpertStatistics found = forced_statistics(routing, spec);
  ASSERT_EQ(found.counts.size(), 5u * 32);
  for (int expert = 0; expert < 32; ++expert) EXPECT_EQ(found.at(2, expert), 0);
  std::vector<int> counts;
  shares(routing, 32, 2, &counts);  // of layer 3
  const auto most = std::max_element(counts.begin(), counts.end()) - counts.begin();
  for (int expert = 0; expert < 32; ++expert)
    EXPECT_EQ(found.at(3, expert) < found.at(3, static_cast<int>(most)), expert != most) << expert;
  EXPECT_EQ(found.at(3, static_cast<int>(most)), 1000000000);
}

TEST(ForcedRouting, SeedsAndLayersDiffer) {
  const std::vector<float> one = forced_ids({.exponent = 1}, 0, 16, 4);
  EXPECT_EQ(one, forced_ids({.exponent = 1}, 0, 16, 4));
  EXPECT_NE(one, forced_ids({.exponent = 1}, 1, 16, 4));
  EXPECT_NE(one, forced_ids({.exponent = 1, .seed = 2}, 0, 16, 4));
}

}  // namespace
}  // namespace kt::inline models
