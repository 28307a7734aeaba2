#include "bench/plot.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/text.h"
#include "terminal/report.h"

namespace kt::inline bench {
namespace {

constexpr double kWidth = 460, kHeight = 320, kChartLeft = 62, kChartRight = 16, kChartTop = 40, kBottom = 46;
constexpr double kBarChartWidth = 640, kBarNames = 200, kBarValues = 90, kBarLine = 24;
constexpr int kTicks = 5;
constexpr double kLegendLine = 16;
constexpr auto kColours =
    std::to_array<const char*>({"#3b76d6", "#d9622b", "#2f9e63", "#9a55c4", "#c23b57", "#8a8420"});

constexpr const char* kStyle =
    "<style>text{font:12px system-ui,sans-serif;fill:#333}.title{font-weight:600;font-size:14px}"
    ".axis{stroke:#888;fill:none}.grid{stroke:#8884}.back{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.back{fill:#181a1e}}</style>\n";

std::string escaped(const std::string& string) {
  std::string out;
  for (char c : string)
    out += c == '<'   ? "&lt;"
           : c == '>' ? "&gt;"
           : c == '&' ? "&amp;"
           : c == '"' ? "&quot;"
                      : std::string(1, c);
  return out;
}

std::string chart_text(double x, double y, const char* anchor, const std::string& caption,
                       const char* kind = "") {
  return text("<text x=\"{}\" y=\"{}\" text-anchor=\"{}\" class=\"{}\">{}</text>\n", fixed(x, 1), fixed(y, 1),
              anchor, kind, escaped(caption));
}

// 64, not 64.0: most sweeps run over whole numbers.
std::string tick_name(double value) {
  return value == std::floor(value) && std::fabs(value) < 1e6 ? fixed(value, 0) : three_digits(value);
}

std::string line(double x1, double y1, double x2, double y2, const char* kind) {
  return text("<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" class=\"{}\"/>\n", fixed(x1, 1), fixed(y1, 1),
              fixed(x2, 1), fixed(y2, 1), kind);
}

// From values to places inside one chart.
struct Axes {
  double left, x_low, x_high, y_high;
  bool log_x;

  double x(double value) const {
    const auto scaled = [&](double v) { return log_x ? std::log(v) : v; };
    const double width = scaled(x_high) - scaled(x_low);
    const double part = width > 0 ? (scaled(value) - scaled(x_low)) / width : 0.5;
    return left + kChartLeft + part * (kWidth - kChartLeft - kChartRight);
  }
  double y(double value) const {
    return kHeight - kBottom - value / y_high * (kHeight - kChartTop - kBottom);
  }
};

Axes axes_of(const Chart& chart, double left) {
  Axes axes{left, 0, 1, 0, chart.log_x};
  bool first = true;
  for (const Series& series : chart.series)
    for (const auto& [x, y] : series.points) {
      axes.x_low = first ? x : std::min(axes.x_low, x);
      axes.x_high = first ? x : std::max(axes.x_high, x);
      axes.y_high = std::max(axes.y_high, y);
      first = false;
    }
  const double step = tick_step(axes.y_high, kTicks);
  axes.y_high = axes.y_high > 0 ? std::ceil(axes.y_high / step) * step : 1;
  return axes;
}

// Every x that has a point gets a tick: sweeps have few, and these are the interesting ones.
std::vector<double> x_ticks(const Chart& chart) {
  std::vector<double> out;
  for (const Series& series : chart.series)
    for (const auto& point : series.points) out.push_back(point.first);
  std::ranges::sort(out);
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

std::string draw(const Chart& chart, double left) {
  const Axes axes = axes_of(chart, left);
  const double bottom = kHeight - kBottom, right = left + kWidth - kChartRight;
  std::string out = chart_text(left + kChartLeft, 22, "start", chart.title, "title");
  const double step = tick_step(axes.y_high, kTicks);
  // NOLINTNEXTLINE(bugprone-float-loop-counter): what the sums miss is less than the thousandth.
  for (double y = 0; y <= axes.y_high * 1.001; y += step) {
    out += line(left + kChartLeft, axes.y(y), right, axes.y(y), "grid");
    out += chart_text(left + kChartLeft - 6, axes.y(y) + 4, "end", tick_name(y));
  }
  for (double x : x_ticks(chart)) {
    out += line(axes.x(x), bottom, axes.x(x), bottom + 4, "axis");
    out += chart_text(axes.x(x), bottom + 18, "middle", tick_name(x));
  }
  out += line(left + kChartLeft, bottom, right, bottom, "axis");
  out += chart_text((left + kChartLeft + right) / 2, kHeight - 8, "middle", chart.x_label);
  out += chart_text(left + kChartLeft - 6, kChartTop - 12, "end", chart.y_label);
  for (size_t i = 0; i < chart.series.size(); ++i) {
    const char* colour = kColours[i % kColours.size()];
    std::string path;
    for (const auto& [x, y] : chart.series[i].points) {
      path += text("{}{} {} ", path.empty() ? "M" : "L", fixed(axes.x(x), 1), fixed(axes.y(y), 1));
      out += text("<circle cx=\"{}\" cy=\"{}\" r=\"3\" fill=\"{}\"/>\n", fixed(axes.x(x), 1),
                  fixed(axes.y(y), 1), colour);
    }
    out += text("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n", path, colour);
    if (chart.series.size() < 2) continue;
    const double y = kChartTop + 8 + kLegendLine * static_cast<double>(i);
    out += text("<rect x=\"{}\" y=\"{}\" width=\"10\" height=\"10\" fill=\"{}\"/>\n",
                fixed(left + kChartLeft + 10, 1), fixed(y - 9, 1), colour);
    out += chart_text(left + kChartLeft + 26, y, "start", chart.series[i].name);
  }
  return out;
}

std::string draw(const BarChart& chart, double left) {
  double longest = 0;
  for (const Bar& bar : chart.bars) longest = std::max({longest, bar.value, bar.mark});
  const double zero = left + kBarNames, width = kBarChartWidth - kBarNames - kBarValues;
  const auto x = [&](double value) { return zero + (longest > 0 ? value / longest : 0) * width; };
  std::string out = chart_text(left + 12, 22, "start", chart.title, "title");
  double y = kChartTop;
  for (const Bar& bar : chart.bars) {
    out += chart_text(zero - 8, y + 12, "end", bar.name);
    out += text("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"14\" fill=\"{}\"/>\n", fixed(zero, 1),
                fixed(y, 1), fixed(x(bar.value) - zero, 1), kColours[0]);
    if (bar.mark > 0)
      out += text("<rect x=\"{}\" y=\"{}\" width=\"3\" height=\"18\" fill=\"{}\"/>\n",
                  fixed(x(bar.mark) - 1.5, 1), fixed(y - 2, 1), kColours[1]);
    out += chart_text(x(bar.value) + 8, y + 12, "start", text("{} {}", three_digits(bar.value), chart.unit));
    y += kBarLine;
  }
  out += text("<rect x=\"{}\" y=\"{}\" width=\"3\" height=\"14\" fill=\"{}\"/>\n", fixed(zero, 1),
              fixed(y + 4, 1), kColours[1]);
  return out + chart_text(zero + 10, y + 16, "start", chart.mark_label);
}

std::string page(double width, double height, const std::string& inside) {
  return text(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" width=\"{}\" height=\"{}\">\n{}"
      "<rect class=\"back\" width=\"100%\" height=\"100%\"/>\n{}</svg>\n",
      fixed(width, 0), fixed(height, 0), fixed(width, 0), fixed(height, 0), kStyle, inside);
}

}  // namespace

double tick_step(double most, int steps) {
  if (!(most > 0) || steps < 1) return 1;
  const double rough = most / steps, ten = std::pow(10, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0})
    if (rough <= factor * ten * 1.0001) return factor * ten;
  return 10 * ten;
}

std::string svg(std::span<const Chart> charts) {
  std::string out;
  for (size_t i = 0; i < charts.size(); ++i) out += draw(charts[i], kWidth * static_cast<double>(i));
  return page(kWidth * static_cast<double>(charts.size()), kHeight, out);
}

std::string svg(std::span<const BarChart> charts) {
  std::string out;
  size_t most = 0;
  for (size_t i = 0; i < charts.size(); ++i) {
    out += draw(charts[i], kBarChartWidth * static_cast<double>(i));
    most = std::max(most, charts[i].bars.size());
  }
  return page(kBarChartWidth * static_cast<double>(charts.size()),
              kChartTop + kBarLine * (static_cast<double>(most) + 1.5), out);
}

}  // namespace kt::inline bench
