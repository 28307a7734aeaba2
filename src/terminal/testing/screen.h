// For tests: what a terminal shows, just enough of one, with the wrap that waits for the next character.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.h"
#include "terminal/line_screen.h"
#include "terminal/terminal_text.h"

namespace kt::inline terminal {

class Screen {
 public:
  Screen(int width, int height)
      : width_(width), rows_(static_cast<size_t>(height), Row(static_cast<size_t>(width))) {}

  void write(std::string_view bytes) {
    for (size_t at = 0; at < bytes.size();) {
      if (bytes[at] == '\x1b') {
        at = escape(bytes, at);
        continue;
      }
      const CodePoint code = next_code_point(bytes, at);
      if (code == '\r') {
        column_ = 0;
        wraps_ = false;
      } else if (code == '\n') {
        line_feed();
      } else {
        put(code);
      }
    }
  }

  std::string text() const {  // without blank rows at the end and blanks at row ends
    std::string out;
    for (const Row& row : rows_) {
      std::string line;
      for (const std::string& cell : row) line += cell.empty() ? " " : cell == kRight ? "" : cell;
      line.erase(line.find_last_not_of(' ') + 1);
      out += line + "\n";
    }
    while (out.ends_with("\n\n")) out.pop_back();
    return out == "\n" ? "" : out;
  }
  ScreenPlace cursor() const { return {row_, column_}; }

 private:
  using Row = std::vector<std::string>;
  static constexpr const char* kRight = "\xff";  // the right half of a wide character

  std::string& cell(int row, int column) {
    return rows_[static_cast<size_t>(row)][static_cast<size_t>(column)];
  }

  void put(CodePoint code) {
    const int cells = cell_width(code);
    if (cells == 0) {
      const int at = wraps_ ? column_ : column_ - 1;
      std::string& base = cell(row_, at);
      (base == kRight ? cell(row_, at - 1) : base) += to_utf8(code);
      return;
    }
    if (wraps_ || column_ + cells > width_) {
      column_ = 0;
      line_feed();
    }
    wraps_ = false;
    cell(row_, column_) = to_utf8(code);
    if (cells == 2) cell(row_, column_ + 1) = kRight;
    column_ += cells;
    if (column_ < width_) return;
    column_ = width_ - 1;
    wraps_ = true;
  }

  void line_feed() {
    wraps_ = false;
    if (++row_ < static_cast<int>(rows_.size())) return;
    rows_.erase(rows_.begin());
    rows_.emplace_back(static_cast<size_t>(width_));
    --row_;
  }

  size_t escape(std::string_view bytes, size_t at) {
    EXPECT_EQ(bytes.at(at + 1), '[');
    size_t end = at + 2;
    while (end < bytes.size() && (bytes[end] < 0x40 || bytes[end] > 0x7e)) ++end;
    const std::string argument(bytes.substr(at + 2, end - at - 2));
    const int n = argument.empty() || argument[0] == '?' ? 0 : std::atoi(argument.c_str());
    act(bytes.at(end), n);
    return end + 1;
  }

  void act(char command, int n) {
    wraps_ = wraps_ && command == 'm';
    if (command == 'A') row_ = std::max(0, row_ - std::max(1, n));
    if (command == 'C') column_ = std::min(width_ - 1, column_ + std::max(1, n));
    if (command == 'H') row_ = column_ = 0;
    if (command == 'K') erase(row_, column_, row_ + 1);
    if (command == 'J' && n == 0) erase(row_, column_, static_cast<int>(rows_.size()));
    if (command == 'J' && n == 2) erase(0, 0, static_cast<int>(rows_.size()));
  }

  void erase(int row, int column, int end) {
    for (; row < end; ++row, column = 0)
      for (int c = column; c < width_; ++c) cell(row, c).clear();
  }

  int width_, row_ = 0, column_ = 0;
  bool wraps_ = false;
  std::vector<Row> rows_;
};

}  // namespace kt::inline terminal
