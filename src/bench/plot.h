// Line and bar charts as SVG, for reports: readable in a browser, light or dark, without anything else.
#pragma once
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kt::inline bench {

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x rising
};

struct Chart {
  std::string title, x_label, y_label;
  bool log_x = false;  // x above 0 then
  std::vector<Series> series;
};

// The charts side by side in one picture. y axes begin at 0.
std::string svg(std::span<const Chart> charts);

// One bar below the other, a mark in each: what a part took, and the least it could take.
struct Bar {
  std::string name;
  double value = 0, mark = 0;  // no mark: 0
};
struct BarChart {
  std::string title, unit, mark_label;
  std::vector<Bar> bars;
};
std::string svg(std::span<const BarChart> charts);

// The least of 1, 2, 5 times a power of ten that covers [0, most] in at most `steps` steps.
double tick_step(double most, int steps);

}  // namespace kt::inline bench
