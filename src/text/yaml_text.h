// The characters of a YAML text and a place among them: blanks, comments, lines, and scalars as they are
// written. What scalars mean and how they nest is for others.
#pragma once
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/utf8.h"

namespace kt::inline texts {

enum class YamlStyle { kBlock, kFlow };  // in flow ",[]{}" end a plain scalar and indentation means nothing

inline bool is_yaml_blank(char c) { return c == ' ' || c == '\t'; }

class YamlText {
 public:
  // Error(kInput) unless all of it is UTF-8 and printable. Line breaks become '\n'.
  YamlText(std::string_view characters, std::string_view name);

  size_t here() const { return here_; }
  // '\0' behind the end; never in the text.
  char peek(size_t ahead = 0) const {
    return here_ + ahead < characters_.size() ? characters_[here_ + ahead] : '\0';
  }
  bool at_end() const { return here_ == characters_.size(); }
  void advance(size_t count = 1) { here_ += count; }
  int column() const;                             // of here, from 0
  bool has_line_break_since(size_t place) const;  // between there and here
  int line_breaks(size_t from, size_t to) const;

  bool is_blank_at(size_t ahead) const;  // a space, a tab, the end of a line or of the text
  bool at_indicator(char c) const { return peek() == c && is_blank_at(1); }  // "- ", "? ", ": "
  bool at_comment() const;                                                   // a '#' that begins one
  bool at_document_marker() const;  // "---" or "..." alone at the start of a line

  // Over spaces and tabs; whether a tab was among them.
  bool skip_blanks();
  // Over blanks and a comment to the end of the line; Error if something else stands there.
  void end_line();
  // From the end or the start of a line to the next character that is neither blank nor comment, or the end.
  void next_content();
  // The same within a flow collection, from anywhere.
  void next_in_flow();

  // A scalar that stands here; afterwards here is behind it. What a plain one has on this line, which may
  // turn out to be a key; and, if it did not, the whole of it when the lines below carry on. Block scalars
  // and plain ones belong to a collection at column `parent`, -1 for none.
  std::string quoted();
  std::string plain_line(YamlStyle style);
  std::string plain_lines(std::string first_line, YamlStyle style, int parent);
  std::string block_scalar(int parent);

  // "file:line:column: ", then the pattern filled in.
  template <typename... Args>
  [[noreturn]] void fail_at(size_t place, TextPattern<sizeof...(Args)> pattern, const Args&... args) const {
    throw Error(ErrorKind::kInput, position_text(place) + text(pattern, args...));
  }
  // Fails with "found <what stands here>, expected <this>".
  [[noreturn]] void fail_expecting(std::string_view expected) const;

 private:
  struct BlockHeader {
    bool folded = false;
    char chomping = ' ';  // '-' no line break at the end, '+' all of them, ' ' one
    int indentation = 0;  // 0: that of the first line
  };

  std::string position_text(size_t place) const;
  void check_characters() const;
  bool ends_plain(size_t ahead, YamlStyle style) const;
  std::string plain_characters(YamlStyle style);
  std::string single_quoted();
  std::string double_quoted();
  void escape(std::string& out);
  CodePoint hex_digits(int count);
  void fold_quoted_lines(std::string& out, size_t kept);
  size_t skip_line_breaks();
  static void append_folded(std::string& out, size_t breaks);
  BlockHeader block_header();
  int first_indentation(int least) const;
  bool skip_indentation(int indentation);

  std::string characters_;
  std::string_view name_;
  size_t here_ = 0;
};

}  // namespace kt::inline texts
