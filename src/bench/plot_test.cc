#include "bench/plot.h"

#include <gtest/gtest.h>

namespace kt::inline bench {
namespace {

TEST(Plot, TicksAreRoundNumbers) {
  EXPECT_EQ(tick_step(100, 5), 20);
  EXPECT_EQ(tick_step(101, 5), 50);
  EXPECT_DOUBLE_EQ(tick_step(0.7, 5), 0.2);
  EXPECT_EQ(tick_step(0, 5), 1);
}

TEST(Plot, DrawsEverySeriesAndEscapesNames) {
  const Chart chart{"Speed <now>", "x", "y", true, {{"a & b", {{1, 10}, {4, 20}}}, {"c", {{1, 5}, {4, 40}}}}};
  const std::string picture = svg({&chart, 1});
  EXPECT_TRUE(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
  EXPECT_NE(picture.find("Speed &lt;now&gt;"), std::string::npos);
  EXPECT_NE(picture.find("a &amp; b"), std::string::npos);
  size_t paths = 0;
  for (size_t at = 0; (at = picture.find("<path ", at)) != std::string::npos; ++at) ++paths;
  EXPECT_EQ(paths, 2u);
}

TEST(Plot, BarsAreAsLongAsTheirValues) {
  const BarChart chart{
      .title = "A step", .unit = "us", .mark_label = "limit", .bars = {{"experts", 200, 150}, {"a < b", 50}}};
  const std::string picture = svg({&chart, 1});
  EXPECT_NE(picture.find("width=\"350.0\""), std::string::npos);  // the longest: all the room
  EXPECT_NE(picture.find("width=\"87.5\""), std::string::npos);
  EXPECT_NE(picture.find("a &lt; b"), std::string::npos);
  size_t marks = 0;
  for (size_t at = 0; (at = picture.find("width=\"3\"", at)) != std::string::npos; ++at) ++marks;
  EXPECT_EQ(marks, 2u);  // of one bar, and that of the label
  const BarChart none{.title = "t", .unit = "us", .mark_label = "", .bars = {{"idle"}}};
  EXPECT_EQ(svg({&none, 1}).find("nan"), std::string::npos);
}

TEST(Plot, OnePointAndNoneAreDrawnToo) {
  const Chart one{"t", "x", "y", true, {{"a", {{3, 7}}}}}, none{"t", "x", "y", false, {}};
  const Chart both[] = {one, none};
  const std::string picture = svg(both);
  EXPECT_EQ(picture.find("nan"), std::string::npos);
  EXPECT_EQ(picture.find("inf"), std::string::npos);
}

}  // namespace
}  // namespace kt::inline bench
