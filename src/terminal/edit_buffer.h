// A text being edited, its cursor and what was cut: what editing keys do, without keys or screens.
#pragma once
#include <string>
#include <string_view>

namespace kt::inline terminal {

// The text is valid UTF-8 of any number of lines; the cursor stands between visible characters. "Line" means
// what stands between line ends, however many rows it takes on a screen.
class EditBuffer {
 public:
  const std::string& text() const { return text_; }
  size_t cursor() const { return cursor_; }
  bool empty() const { return text_.empty(); }

  void set(std::string text);  // with the cursor at its end
  void set(std::string text, size_t cursor);
  void move_to(size_t cursor) { cursor_ = cursor; }
  void insert(std::string_view text);
  void replace_before_cursor(std::string_view text);  // everything from the start to the cursor

  void left();
  void right();
  void word_left();
  void word_right();
  void line_start();
  void line_end();

  void backspace();
  void erase();  // the character at the cursor
  void transpose();

  // Cuts; yank() puts what was cut last. Cuts in a row collect.
  void cut_to_line_end();
  void cut_to_line_start();
  void cut_space_word_left();  // back to white space
  void cut_word_left();
  void cut_word_right();
  void yank() { insert(cut_); }
  void end_cuts() { collecting_ = false; }  // the next cut starts anew

 private:
  size_t word_left_of(size_t at) const;
  size_t word_right_of(size_t at) const;
  void cut(size_t from, size_t to);

  std::string text_, cut_;
  size_t cursor_ = 0;
  bool collecting_ = false;
};

}  // namespace kt::inline terminal
