#include "terminal/word_wrap.h"

#include "base/text.h"
#include "terminal/terminal_text.h"

namespace kt::inline terminal {
namespace {

constexpr int kNarrowest = 10;
constexpr int kTabStop = 8;

}  // namespace

void WordWrap::end_word() {
  word_.clear();
  word_width_ = 0;
}

void WordWrap::begin_line() {
  end_word();
  column_ = 0;
  breaks_ = false;
}

std::string WordWrap::add(std::string_view text) {
  if (width_ < kNarrowest) return std::string(text);
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const CodePoint code = next_code_point(text, at);
    const std::string_view character = text.substr(begin, at - begin);
    if (code == '\n') {
      out += character;
      begin_line();
    } else if (code == ' ' || code == '\t') {
      add_space(character, out);
    } else {
      add_character(character, cell_width(code), out);
    }
  }
  return out;
}

void WordWrap::add_space(std::string_view space, std::string& out) {
  end_word();
  const int after = space == "\t" ? (column_ / kTabStop + 1) * kTabStop : column_ + 1;
  breaks_ = breaks_ || after >= width_;
  if (breaks_) return;
  out += space;
  column_ = after;
}

// The last column stays free: a cursor behind it is one of those things on which terminals differ.
void WordWrap::add_character(std::string_view character, int cells, std::string& out) {
  if (breaks_) {
    out += '\n';
    begin_line();
  }
  if (cells == 2) end_word();  // scripts of wide characters break anywhere
  if (column_ + cells >= width_ && word_width_ < column_) {
    if (word_width_ > 0) out += text("\r\x1b[{}C\x1b[K", column_ - word_width_);
    out += '\n';
    out += word_;
    column_ = word_width_;
  } else if (column_ + cells > width_) {
    column_ = 0;  // a word longer than the line: the terminal breaks it, and it can be copied whole
  }
  out += character;
  column_ += cells;
  if (cells == 2) return;
  word_ += character;
  word_width_ += cells;
}

}  // namespace kt::inline terminal
