// Text that comes in pieces, broken between words before a terminal breaks it anywhere. Every piece is shown as it
// comes: a word that turns out too long for its line is taken back and written on the next one.
#pragma once
#include <string>
#include <string_view>

namespace kt::inline terminal {

class WordWrap {
 public:
  // Columns of the terminal, which must obey escape sequences. Below some 10 there is nothing to wrap: text goes
  // through as it is.
  explicit WordWrap(int width) : width_(width) {}

  // What to write for the next piece: whole characters, of control characters only '\n' and '\t'.
  std::string add(std::string_view text);
  // Something else ended the line.
  void begin_line();

 private:
  void add_space(std::string_view space, std::string& out);
  void add_character(std::string_view character, int cells, std::string& out);
  void end_word();

  int width_;
  int column_ = 0;
  std::string word_;     // written at the end of the line so far
  int word_width_ = 0;   // columns of it
  bool breaks_ = false;  // a space stood at the edge: the line ends there, unless it ends by itself
};

}  // namespace kt::inline terminal
