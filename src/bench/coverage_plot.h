// How many tokens every expert of a model saw, as a picture: a row for each layer, a cell for each expert,
// the colour its tokens on a logarithmic scale. Readable from two layers of eight experts to sixty of
// hundreds.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kt::inline bench {

struct CoverageCell {
  int64_t tokens = 0;
  bool nearest = false;  // rounded to nearest after all: marked
};
struct CoverageRow {
  int layer = 0;
  std::vector<CoverageCell> cells;  // [experts]
};

// SVG without scripts or references. One path for each colour, with as many subpaths as cells; class "cells".
std::string coverage_svg(const std::string& title, const std::vector<CoverageRow>& rows);

}  // namespace kt::inline bench
