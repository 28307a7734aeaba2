#include "terminal/line_screen.h"

#include <algorithm>

#include "base/text.h"
#include "terminal/terminal_text.h"

namespace kt::inline terminal {
namespace {

constexpr int kLeastWidth = 4;
constexpr std::string_view kTab = "    ";
constexpr std::string_view kPromptOn = "\x1b[1;36m", kPromptOff = "\x1b[0m";

std::string up(int rows) { return rows > 0 ? text("\x1b[{}A", rows) : ""; }

// Down by line feeds, which scroll where they have to.
std::string down(int rows) { return std::string(static_cast<size_t>(std::max(rows, 0)), '\n'); }

std::string to_column(int column) { return column > 0 ? text("\r\x1b[{}C", column) : "\r"; }

}  // namespace

TextLayout::TextLayout(const LayoutInput& input)
    : width_(std::max(input.width, kLeastWidth)), colour_(input.colour), rows_(1) {
  add_prompt(input.prompt);
  for (size_t at = 0; at < input.text.size();) {
    const size_t end = next_cluster(input.text, at);
    const std::string_view cluster = input.text.substr(at, end - at);
    if (cluster == "\n") {
      // Where the row is full, the cursor on its end stands on the last character instead of a row of its
      // own.
      spots_.push_back({at, {static_cast<int>(rows_.size()) - 1, std::min(rows_.back().cells, width_ - 1)}});
      next_row();
      add_prompt(input.more_prompt);
    } else {
      const std::string_view shown = cluster == "\t" ? kTab : cluster;
      const int cells = std::min(text_width(shown), width_);
      if (rows_.back().cells + cells > width_) next_row();
      spots_.push_back({at, {static_cast<int>(rows_.size()) - 1, rows_.back().cells}});
      add(shown, cells);
    }
    at = end;
  }
  if (rows_.back().cells >= width_) next_row();
  spots_.push_back({input.text.size(), {static_cast<int>(rows_.size()) - 1, rows_.back().cells}});
  cursor_ = std::ranges::lower_bound(spots_, input.cursor, {}, &Spot::offset)->place;
}

void TextLayout::add_prompt(std::string_view prompt) {
  for (size_t at = 0; at < prompt.size();) {
    const size_t end = next_cluster(prompt, at);
    const std::string_view cluster = prompt.substr(at, end - at);
    const int cells = text_width(cluster);
    if (rows_.back().cells + cells > width_) next_row();
    if (colour_) rows_.back().bytes += kPromptOn;
    add(cluster, cells);
    if (colour_) rows_.back().bytes += kPromptOff;
    at = end;
  }
}

void TextLayout::add(std::string_view shown, int cells) {
  rows_.back().bytes += shown;
  rows_.back().cells += cells;
}

void TextLayout::next_row() { rows_.emplace_back(); }

size_t TextLayout::offset_at(ScreenPlace place) const {
  size_t best = spots_.front().offset;
  bool in_row = false;
  for (const Spot& spot : spots_) {
    if (spot.place.row > place.row) break;
    const bool here = spot.place.row == place.row;
    if (!here || !in_row || spot.place.column <= place.column) best = spot.offset;
    in_row = here;
  }
  return best;
}

std::string LineScreen::show(const TextLayout& layout, int height) {
  height = std::max(height, 1);
  const int rows = static_cast<int>(layout.rows().size());
  const ScreenPlace cursor = layout.cursor();
  top_ = std::clamp(top_, std::max(0, cursor.row - height + 1), cursor.row);
  top_ = std::min(top_, std::max(0, rows - height));
  const auto first = layout.rows().begin() + top_;
  const std::vector<TextLayout::Row> wanted(first, first + std::min(rows - top_, height));

  size_t same = 0;
  while (same < wanted.size() && same < shown_.size() && wanted[same].bytes == shown_[same].bytes) ++same;
  std::string out;
  int at = cursor_.row;
  if (same < wanted.size() || same < shown_.size()) {
    out += "\x1b[?25l";
    // Rows are ended here, not by the terminal's margin: after its last column terminals disagree.
    for (size_t row = same; row < wanted.size(); ++row) {
      const int target = static_cast<int>(row);
      out += up(at - target) + down(target - at) + "\r\x1b[K" + wanted[row].bytes;
      at = target;
    }
    if (shown_.size() > wanted.size()) {
      const int target = static_cast<int>(wanted.size());
      out += up(at - target) + down(target - at) + "\r\x1b[J";
      at = target;
    }
  }
  const ScreenPlace place{cursor.row - top_, cursor.column};
  const bool written = !out.empty();
  if (written || place != cursor_) out += up(at - place.row) + down(place.row - at) + to_column(place.column);
  if (written) out += "\x1b[?25h";
  shown_ = wanted;
  cursor_ = place;
  return out;
}

std::string LineScreen::leave() {
  const int rows = static_cast<int>(shown_.size());
  std::string out = down(rows - 1 - cursor_.row) + "\r\n";
  forget();
  return out;
}

std::string LineScreen::erase_after_resize(int width) {
  width = std::max(width, kLeastWidth);
  int above = 0;
  for (int row = 0; row < cursor_.row; ++row)
    above += std::max(1, (shown_[static_cast<size_t>(row)].cells + width - 1) / width);
  std::string out = up(above + cursor_.column / width) + "\r\x1b[J";
  forget();
  return out;
}

std::string LineScreen::clear() {
  forget();
  return "\x1b[H\x1b[2J";
}

void LineScreen::forget() {
  shown_.clear();
  cursor_ = {};
  top_ = 0;
}

}  // namespace kt::inline terminal
