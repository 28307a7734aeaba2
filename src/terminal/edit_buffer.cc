#include "terminal/edit_buffer.h"

#include "terminal/terminal_text.h"
#include "text/unicode.h"

namespace kt::inline terminal {
namespace {

bool in_word(std::string_view text, size_t at) { return word_set().contains(next_code_point(text, at)); }
bool is_space(std::string_view text, size_t at) {
  return whitespace_set().contains(next_code_point(text, at));
}

}  // namespace

void EditBuffer::set(std::string text) {
  const size_t end = text.size();
  set(std::move(text), end);
}

void EditBuffer::set(std::string text, size_t cursor) {
  text_ = std::move(text);
  cursor_ = cursor;
}

void EditBuffer::insert(std::string_view text) {
  text_.insert(cursor_, text);
  cursor_ += text.size();
}

void EditBuffer::replace_before_cursor(std::string_view text) {
  text_.replace(0, cursor_, text);
  cursor_ = text.size();
}

void EditBuffer::left() {
  if (cursor_ > 0) cursor_ = previous_cluster(text_, cursor_);
}

void EditBuffer::right() {
  if (cursor_ < text_.size()) cursor_ = next_cluster(text_, cursor_);
}

size_t EditBuffer::word_left_of(size_t at) const {
  while (at > 0 && !in_word(text_, previous_cluster(text_, at))) at = previous_cluster(text_, at);
  while (at > 0 && in_word(text_, previous_cluster(text_, at))) at = previous_cluster(text_, at);
  return at;
}

size_t EditBuffer::word_right_of(size_t at) const {
  while (at < text_.size() && !in_word(text_, at)) at = next_cluster(text_, at);
  while (at < text_.size() && in_word(text_, at)) at = next_cluster(text_, at);
  return at;
}

void EditBuffer::word_left() { cursor_ = word_left_of(cursor_); }
void EditBuffer::word_right() { cursor_ = word_right_of(cursor_); }

void EditBuffer::line_start() {
  while (cursor_ > 0 && text_[cursor_ - 1] != '\n') --cursor_;
}

void EditBuffer::line_end() {
  while (cursor_ < text_.size() && text_[cursor_] != '\n') ++cursor_;
}

void EditBuffer::backspace() {
  if (cursor_ == 0) return;
  const size_t from = previous_cluster(text_, cursor_);
  text_.erase(from, cursor_ - from);
  cursor_ = from;
}

void EditBuffer::erase() {
  if (cursor_ < text_.size()) text_.erase(cursor_, next_cluster(text_, cursor_) - cursor_);
}

// The two characters around the cursor change places, the last two at the end of the text.
void EditBuffer::transpose() {
  if (cursor_ == text_.size()) left();
  if (cursor_ == 0 || cursor_ == text_.size()) return;
  const size_t from = previous_cluster(text_, cursor_), to = next_cluster(text_, cursor_);
  const std::string second = text_.substr(cursor_, to - cursor_);
  text_.erase(cursor_, to - cursor_);
  text_.insert(from, second);
  cursor_ = to;
}

void EditBuffer::cut(size_t from, size_t to) {
  if (!collecting_) cut_.clear();
  collecting_ = true;
  const std::string piece = text_.substr(from, to - from);
  cut_ = from < cursor_ ? piece + cut_ : cut_ + piece;
  text_.erase(from, to - from);
  cursor_ = from;
}

void EditBuffer::cut_to_line_end() {
  const size_t from = cursor_;
  line_end();
  const size_t end = cursor_;
  cursor_ = from;
  cut(from, end == from && end < text_.size() ? end + 1 : end);
}

void EditBuffer::cut_to_line_start() {
  const size_t to = cursor_;
  line_start();
  const size_t from = cursor_;
  cursor_ = to;
  cut(from == to && from > 0 ? from - 1 : from, to);
}

void EditBuffer::cut_space_word_left() {
  size_t from = cursor_;
  while (from > 0 && is_space(text_, previous_cluster(text_, from))) from = previous_cluster(text_, from);
  while (from > 0 && !is_space(text_, previous_cluster(text_, from))) from = previous_cluster(text_, from);
  cut(from, cursor_);
}

void EditBuffer::cut_word_left() { cut(word_left_of(cursor_), cursor_); }
void EditBuffer::cut_word_right() { cut(cursor_, word_right_of(cursor_)); }

}  // namespace kt::inline terminal
