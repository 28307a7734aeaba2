#include "bench/coverage_plot.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/text.h"
#include "bench/plot.h"
#include "terminal/report.h"

namespace kt::inline bench {
namespace {

constexpr double kLeft = 64, kRight = 28, kTop = 62, kUnder = 116, kLeastWidth = 620;
constexpr double kMostAcross = 900, kMostDown = 620;
constexpr double kLabelHeight = 14, kLabelWidth = 34;  // room that one tick's label wants
constexpr const char *kNone = "#9a9a9a", *kMark = "#d4252b";
// Light to dark: experts that saw little are light, where the marks of those that fell back show best.
constexpr auto kShades = std::to_array<const char*>({"#e8f1fb", "#d0e2f4", "#b3d0ec", "#90bae0", "#6aa2d3",
                                                     "#4a89c4", "#3270b1", "#1f5799", "#123f7c", "#0a2a5c"});

constexpr const char* kLook =
    "<style>text{font:12px system-ui,sans-serif;fill:#333}.title{font-weight:600;font-size:14px}"
    ".frame{stroke:#888;fill:none}.back{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.back{fill:#181a1e}}</style>\n";

std::string label(double x, double y, const char* anchor, const std::string& caption,
                  const char* kind = "tick") {
  return text("<text x=\"{}\" y=\"{}\" text-anchor=\"{}\" class=\"{}\">{}</text>\n", fixed(x, 1), fixed(y, 1),
              anchor, kind, caption);
}

std::string box(double x, double y, double width, double height) {
  return text("M{} {}h{}v{}h-{}z", fixed(x, 2), fixed(y, 2), fixed(width, 2), fixed(height, 2),
              fixed(width, 2));
}

std::string filled(const std::string& path, const char* colour, const char* kind) {
  return path.empty() ? "" : text("<path class=\"{}\" d=\"{}\" fill=\"{}\"/>\n", kind, path, colour);
}

struct ShadeScale {
  int64_t least = 1, most = 1;  // of tokens above 0

  size_t shade(int64_t tokens) const {
    const double width = std::log(static_cast<double>(most)) - std::log(static_cast<double>(least));
    const double part =
        width > 0 ? (std::log(static_cast<double>(tokens)) - std::log(static_cast<double>(least))) / width
                  : 1;
    return std::min(static_cast<size_t>(part * static_cast<double>(kShades.size())), kShades.size() - 1);
  }
  // Where shade number i begins, in tokens.
  int64_t start(size_t i) const {
    const double low = std::log(static_cast<double>(least)), high = std::log(static_cast<double>(most));
    return std::llround(
        std::exp(low + (high - low) * static_cast<double>(i) / static_cast<double>(kShades.size())));
  }
};

struct Facts {
  size_t experts = 0, nearest = 0, cells = 0;
  std::vector<int64_t> tokens;  // ascending
  ShadeScale scale;
};

Facts facts_of(const std::vector<CoverageRow>& rows) {
  Facts out;
  for (const CoverageRow& row : rows) {
    out.experts = std::max(out.experts, row.cells.size());
    out.cells += row.cells.size();
    for (const CoverageCell& cell : row.cells) {
      out.tokens.push_back(cell.tokens);
      out.nearest += cell.nearest ? 1 : 0;
    }
  }
  std::ranges::sort(out.tokens);
  const auto some = std::ranges::upper_bound(out.tokens, 0);
  if (some != out.tokens.end()) out.scale = {*some, out.tokens.back()};
  return out;
}

// Numbers from 0 whose labels do not touch.
size_t label_step(size_t count, double each, double room) {
  const int most = std::max(1, static_cast<int>(each * static_cast<double>(count) / room));
  return std::max<size_t>(1, static_cast<size_t>(tick_step(static_cast<double>(count), most)));
}

// Colour bar, 0, and the mark, below the cells.
std::string key(const ShadeScale& scale, double top) {
  constexpr double kWidth = 26, kHeight = 12;
  std::string out = label(kLeft, top, "start", "tokens routed to the expert, logarithmic scale", "axis");
  const double y = top + 10;
  out += text("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"/>\n", fixed(kLeft, 1),
              fixed(y, 1), fixed(kWidth - 8, 1), fixed(kHeight, 1), kNone);
  out += label(kLeft + (kWidth - 8) / 2, y + 26, "middle", "0");
  const double bar = kLeft + kWidth;
  for (size_t i = 0; i < kShades.size(); ++i)
    out += text("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"/>\n",
                fixed(bar + kWidth * static_cast<double>(i), 1), fixed(y, 1), fixed(kWidth, 1),
                fixed(kHeight, 1), kShades[i]);
  constexpr size_t kNamed[] = {0, 3, 6};
  for (const size_t i : kNamed)
    if (i == 0 || scale.start(i) != scale.start(i - 3))
      out += label(bar + kWidth * static_cast<double>(i), y + 26, i == 0 ? "start" : "middle",
                   std::to_string(scale.start(i)));
  const double end = bar + kWidth * static_cast<double>(kShades.size());
  if (scale.most != scale.least) out += label(end, y + 26, "middle", std::to_string(scale.most));
  out += text("<path class=\"key\" d=\"M{} {}l14 12\" stroke=\"{}\" stroke-width=\"1.6\"/>\n",
              fixed(end + 42, 1), fixed(y, 1), kMark);
  return out + label(end + 62, y + 10, "start", "rounded to nearest");
}

}  // namespace

std::string coverage_svg(const std::string& title, const std::vector<CoverageRow>& rows) {
  const Facts facts = facts_of(rows);
  const auto across = static_cast<double>(std::max<size_t>(facts.experts, 1)),
             down = static_cast<double>(std::max<size_t>(rows.size(), 1));
  const double w = std::min(40.0, kMostAcross / across), h = std::clamp(kMostDown / down, 6.0, 26.0);
  const double gap = w > 8 ? 1 : 0, right = kLeft + w * across, bottom = kTop + h * down;
  const double width = std::max(kLeastWidth, right + kRight), height = bottom + kUnder;
  std::array<std::string, kShades.size()> shades;
  std::string none, marks, out;
  for (size_t r = 0; r < rows.size(); ++r)
    for (size_t e = 0; e < rows[r].cells.size(); ++e) {
      const CoverageCell& cell = rows[r].cells[e];
      const double x = kLeft + w * static_cast<double>(e), y = kTop + h * static_cast<double>(r);
      (cell.tokens > 0 ? shades[facts.scale.shade(cell.tokens)] : none) += box(x, y, w - gap, h - gap);
      if (cell.nearest)
        marks += text("M{} {}L{} {}", fixed(x + w * 0.15, 2), fixed(y + h * 0.15, 2),
                      fixed(x + w * 0.85 - gap, 2), fixed(y + h * 0.85 - gap, 2));
    }
  out = text(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" width=\"{}\" height=\"{}\">\n{}"
      "<rect class=\"back\" width=\"100%\" height=\"100%\"/>\n",
      fixed(width, 0), fixed(height, 0), fixed(width, 0), fixed(height, 0), kLook);
  out += label(kLeft, 22, "start", title, "title");
  if (facts.cells == 0) return out + label(kLeft, 42, "start", "no routed experts", "axis") + "</svg>\n";
  out += label(kLeft, 42, "start",
               text("least {}, median {}, most {} tokens; {} of {} rounded to nearest", facts.tokens.front(),
                    facts.tokens[facts.tokens.size() / 2], facts.tokens.back(), facts.nearest, facts.cells),
               "axis");
  out += filled(none, kNone, "cells");
  for (size_t i = 0; i < kShades.size(); ++i) out += filled(shades[i], kShades[i], "cells");
  if (!marks.empty())
    out += text("<path class=\"marks\" d=\"{}\" stroke=\"{}\" stroke-width=\"{}\" fill=\"none\"/>\n", marks,
                kMark, w > 8 ? "1.6" : "1");
  out += text("<path class=\"frame\" d=\"{}\"/>\n", box(kLeft, kTop, w * across, h * down));
  for (size_t e = 0; e < facts.experts; e += label_step(facts.experts, w, kLabelWidth))
    out += label(kLeft + w * (static_cast<double>(e) + 0.5), bottom + 16, "middle", std::to_string(e));
  for (size_t r = 0; r < rows.size(); r += label_step(rows.size(), h, kLabelHeight))
    out +=
        label(kLeft - 8, kTop + h * (static_cast<double>(r) + 0.5) + 4, "end", std::to_string(rows[r].layer));
  out += label((kLeft + right) / 2, bottom + 34, "middle", "expert", "axis");
  out += label(kLeft - 8, kTop - 6, "end", "layer", "axis");
  return out + key(facts.scale, bottom + 62) + "</svg>\n";
}

}  // namespace kt::inline bench
