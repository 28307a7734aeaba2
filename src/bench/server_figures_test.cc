#include "bench/server_figures.h"

#include <gtest/gtest.h>

namespace kt::inline bench {
namespace {

StreamOutcome answered(double start, double first, double last, int64_t tokens) {
  return {.start = start,
          .first = first,
          .last = last,
          .end = last,
          .longest_gap = 0.25,
          .prompt_tokens = 10,
          .tokens = tokens,
          .pieces = tokens,
          .counted = true};
}

TEST(ServerFigures, RatesAndTimes) {
  // Two streams decode together from 1 to 3 and from 2 to 4, a third alone from 6 to 8: five seconds in all.
  const StreamsResult result{
      .requests = {answered(0, 1, 3, 11), answered(0, 2, 4, 11), answered(4, 6, 8, 11)},
      .start = 0,
      .end = 8};
  const LevelFigures level = figures_of(result, 2, 10);
  EXPECT_EQ(level.ok, 3);
  EXPECT_EQ(level.failed, 0);
  EXPECT_DOUBLE_EQ(level.output_rate, 33 / 8.0);
  EXPECT_DOUBLE_EQ(level.total_rate, 63 / 8.0);
  EXPECT_DOUBLE_EQ(level.decode_rate, 30 / 5.0);
  EXPECT_DOUBLE_EQ(level.per_token.p50, 0.2);
  EXPECT_DOUBLE_EQ(level.first_token.p50, 2);
  EXPECT_DOUBLE_EQ(level.longest_gap, 0.25);
  EXPECT_TRUE(level.counted);
}

TEST(ServerFigures, FailuresAreCountedByKindAndNowhereElse) {
  StreamOutcome bad = answered(0, 100, 100, 1);
  bad.failure = "HTTP 503: full";
  const LevelFigures level =
      figures_of({.requests = {answered(0, 1, 2, 2), bad, bad}, .start = 0, .end = 2}, 1, 10);
  EXPECT_EQ(level.ok, 1);
  EXPECT_EQ(level.failures.at("HTTP 503: full"), 2);
  EXPECT_DOUBLE_EQ(level.first_token.p99, 1);
  EXPECT_NE(table_of({level}).find("2 x HTTP 503: full"), std::string::npos);
  EXPECT_EQ(json_of(level)["failures"]["HTTP 503: full"], 2);
}

TEST(ServerFigures, NothingAndOneTokenAreNoDivisionByZero) {
  const LevelFigures none = figures_of(StreamsResult{}, 4, 10);
  EXPECT_EQ(none.output_rate, 0);
  const LevelFigures one = figures_of({.requests = {answered(0, 1, 1, 1)}, .start = 0, .end = 1}, 1, 10);
  EXPECT_EQ(one.decode_rate, 0);
  EXPECT_EQ(one.per_token.p99, 0);
  EXPECT_EQ(svg(charts_of({none, one})).find("nan"), std::string::npos);
}

TEST(ServerFigures, PercentilesAreOfSortedValues) {
  std::vector<double> values;
  for (int i = 100; i >= 0; --i) values.push_back(i);
  const Percentiles at = percentiles_of(values);
  EXPECT_DOUBLE_EQ(at.p50, 50);
  EXPECT_DOUBLE_EQ(at.p90, 90);
  EXPECT_DOUBLE_EQ(at.p95, 95);
  EXPECT_DOUBLE_EQ(at.p99, 99);
}

}  // namespace
}  // namespace kt::inline bench
