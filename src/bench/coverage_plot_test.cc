#include "bench/coverage_plot.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <regex>

namespace kt::inline bench {
namespace {

std::vector<CoverageRow> rows(int layers, int experts) {
  std::vector<CoverageRow> out;
  for (int l = 0; l < layers; ++l) {
    out.push_back({.layer = l + 3, .cells = {}});
    for (int e = 0; e < experts; ++e) out.back().cells.push_back({.tokens = e * e * 7, .nearest = e < 2});
  }
  return out;
}

// Shapes in the paths of that class. (A path may be long, and std::regex recurses for every character.)
size_t shapes(std::string_view all, const std::string& kind) {
  const std::string begin = "class=\"" + kind + "\" d=\"";
  size_t out = 0;
  for (size_t at = all.find(begin); at != std::string_view::npos; at = all.find(begin, at)) {
    at += begin.size();
    out += static_cast<size_t>(std::ranges::count(all.substr(at, all.find('"', at) - at), 'M'));
  }
  return out;
}

struct Picture {
  std::string all;
  double width = 0, height = 0;
  size_t cells = 0, marks = 0, labels = 0;
};

// Takes the picture apart; every label has to lie inside of it.
Picture drawn(int layers, int experts) {
  Picture out{.all = coverage_svg("Tokens", rows(layers, experts))};
  std::smatch found;
  EXPECT_TRUE(std::regex_search(out.all, found, std::regex(R"re(viewBox="0 0 (\d+) (\d+)")re")));
  out.width = std::stod(found[1]);
  out.height = std::stod(found[2]);
  out.cells = shapes(out.all, "cells");
  out.marks = shapes(out.all, "marks");
  const std::regex label(R"re(<text x="([^"]*)" y="([^"]*)" text-anchor="(\w+)"[^>]*>([^<]*)<)re");
  for (std::sregex_iterator at(out.all.begin(), out.all.end(), label), end; at != end; ++at) {
    const std::smatch& m = *at;
    const double x = std::stod(m[1]), y = std::stod(m[2]), wide = 7.0 * static_cast<double>(m[4].length());
    const double left = m[3] == "start" ? x : m[3] == "end" ? x - wide : x - wide / 2;
    EXPECT_GE(left, 0) << m[4];
    EXPECT_LE(left + wide, out.width) << m[4];
    EXPECT_GT(y, 8) << m[4];
    EXPECT_LT(y, out.height) << m[4];
    ++out.labels;
  }
  return out;
}

TEST(CoveragePlot, EveryExpertHasACellAndLabelsStayFewAndInside) {
  for (const auto& [layers, experts] : {std::pair{2, 8}, {61, 256}, {1, 1}, {48, 128}, {94, 512}}) {
    const Picture picture = drawn(layers, experts);
    EXPECT_EQ(picture.cells, static_cast<size_t>(layers * experts));
    EXPECT_EQ(picture.marks, static_cast<size_t>(layers * std::min(experts, 2)));
    EXPECT_LE(picture.labels, 75u) << layers << " x " << experts;
    EXPECT_LE(picture.width, 1000);
    EXPECT_LE(picture.height, 820);
    EXPECT_EQ(picture.all.find("nan"), std::string::npos);
  }
  const Picture small = drawn(2, 8);
  EXPECT_NE(small.all.find("least 0, median 112, most 343 tokens; 4 of 16 rounded to nearest"),
            std::string::npos);
  EXPECT_NE(small.all.find(">6</text>"), std::string::npos);  // the last expert has its tick
}

TEST(CoveragePlot, NothingAndEqualCountsAreDrawnToo) {
  EXPECT_NE(coverage_svg("t", {}).find("no routed experts"), std::string::npos);
  const std::string none = coverage_svg("t", {{.layer = 0, .cells = {{}, {}}}}),
                    equal = coverage_svg("t", {{.layer = 0, .cells = {{.tokens = 5}, {.tokens = 5}}}});
  for (const std::string& picture : {none, equal}) {
    EXPECT_TRUE(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
    EXPECT_EQ(picture.find("nan"), std::string::npos);
    EXPECT_EQ(picture.find("inf"), std::string::npos);
  }
}

}  // namespace
}  // namespace kt::inline bench
