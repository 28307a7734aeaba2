// The scalars of YamlText that are delimited: by quotes, or by their indentation.
#include <algorithm>
#include <iterator>

#include "text/yaml_text.h"

namespace kt::inline texts {

// Quoted scalars.

std::string YamlText::quoted() { return peek() == '"' ? double_quoted() : single_quoted(); }

// At a line break inside quotes: blanks around it are not kept, those before up to `kept`.
void YamlText::fold_quoted_lines(std::string& out, size_t kept) {
  out.resize(kept);
  append_folded(out, skip_line_breaks());
  if (at_document_marker()) fail_expecting("the closing quote before the document ends");
}

std::string YamlText::single_quoted() {
  const size_t start = here_;
  advance();
  std::string out;
  size_t kept = 0;  // characters of out that a line break does not take away
  for (;;) {
    if (at_end()) fail_at(start, "found a quote that is not closed, expected another ' behind the text");
    const char c = peek();
    if (c == '\n') {
      fold_quoted_lines(out, kept);
      kept = out.size();
      continue;
    }
    advance();
    if (c == '\'' && peek() != '\'') return out;
    if (c == '\'') advance();
    out += c;
    if (!is_yaml_blank(c)) kept = out.size();
  }
}

std::string YamlText::double_quoted() {
  const size_t start = here_;
  advance();
  std::string out;
  size_t kept = 0;
  for (;;) {
    if (at_end()) fail_at(start, "found a quote that is not closed, expected another \" behind the text");
    const char c = peek();
    if (c == '\n') {
      fold_quoted_lines(out, kept);
      kept = out.size();
      continue;
    }
    advance();
    if (c == '"') return out;
    if (c == '\\')
      escape(out);
    else
      out += c;
    if (!is_yaml_blank(c)) kept = out.size();
  }
}

CodePoint YamlText::hex_digits(int count) {
  CodePoint code = 0;
  for (; count > 0; --count, advance()) {
    constexpr std::string_view kHex = "0123456789abcdef";
    const char c = peek();
    const size_t digit = kHex.find(c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c);
    if (digit == kHex.npos) fail_expecting("a hexadecimal digit of an escape");
    code = code << 4 | static_cast<CodePoint>(digit);
  }
  return code;
}

// Behind a backslash.
void YamlText::escape(std::string& out) {
  const size_t backslash = here_ - 1;
  if (peek() == '\n') {  // joins the lines
    out.append(skip_line_breaks() - 1, '\n');
    return;
  }
  constexpr std::string_view kLetters = "0abt\tnvfre \"/\\N_LP";
  constexpr CodePoint kMeanings[] = {0,    '\a', '\b', '\t', '\t', '\n', '\v', '\f',   '\r',
                                     0x1B, ' ',  '"',  '/',  '\\', 0x85, 0xA0, 0x2028, 0x2029};
  static_assert(std::size(kMeanings) == kLetters.size());
  const char letter = peek();
  if (const size_t i = kLetters.find(letter); i != kLetters.npos && !at_end()) {
    advance();
    return append_utf8(out, kMeanings[i]);
  }
  if (letter != 'x' && letter != 'u' && letter != 'U') fail_expecting("an escape that YAML has");
  advance();
  CodePoint code = hex_digits(letter == 'x' ? 2 : letter == 'u' ? 4 : 8);
  const auto is_half = [](CodePoint half, CodePoint first) { return half >= first && half < first + 0x400; };
  // JSON writes characters past U+FFFF as two.
  if (letter == 'u' && is_half(code, 0xD800) && peek() == '\\' && peek(1) == 'u') {
    advance(2);
    const CodePoint low = hex_digits(4);
    code = is_half(low, 0xDC00) ? 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) : 0xD800;
  }
  if (code > kLastCodePoint || (code >= 0xD800 && code < 0xE000))
    fail_at(backslash, "found an escape of half a pair or past 10FFFF, expected a character of Unicode");
  append_utf8(out, code);
}

// Literal and folded scalars.

YamlText::BlockHeader YamlText::block_header() {
  BlockHeader header{.folded = peek() == '>'};
  advance();
  for (int i = 0; i < 2; ++i) {
    if (header.chomping == ' ' && (peek() == '+' || peek() == '-')) {
      header.chomping = peek();
      advance();
    } else if (header.indentation == 0 && peek() >= '1' && peek() <= '9') {
      header.indentation = peek() - '0';
      advance();
    }
  }
  end_line();
  return header;
}

// Of the first line from here that is not all spaces, at least `least`.
int YamlText::first_indentation(int least) const {
  size_t longest_blank = 0;
  for (size_t line = here_;;) {
    const size_t content = characters_.find_first_not_of(' ', line);
    if (content == characters_.npos) return least;
    const size_t spaces = content - line;
    if (characters_[content] != '\n') {
      if (static_cast<int>(spaces) < least) return least;
      if (longest_blank > spaces)
        fail_at(content,
                "found text less indented than an empty line above, expected {} spaces or an indentation "
                "indicator",
                longest_blank);
      return static_cast<int>(spaces);
    }
    longest_blank = std::max(longest_blank, spaces);
    line = content + 1;
  }
}

// Over so many spaces, or the fewer of an empty line; false, and no step made, where text stands before that.
bool YamlText::skip_indentation(int indentation) {
  const size_t start = here_;
  while (peek() == ' ' && static_cast<int>(here_ - start) < indentation) advance();
  const bool reached = static_cast<int>(here_ - start) == indentation || peek() == '\n' || at_end();
  if (!reached) here_ = start;
  return reached;
}

std::string YamlText::block_scalar(int parent) {
  const BlockHeader header = block_header();
  if (!at_end()) advance();
  const int indentation =
      header.indentation > 0 ? std::max(parent, 0) + header.indentation : first_indentation(parent + 1);
  std::string out;
  size_t empty_lines = 0;                           // since the last line of text
  bool any = false, broken = false, loose = false;  // a line of text; its line break; it began with a blank
  while (!at_end() && !at_document_marker() && skip_indentation(indentation)) {
    if (peek() == '\n') {
      ++empty_lines;
      advance();
      continue;
    }
    if (at_end()) break;
    const bool folds = header.folded && !loose && !is_yaml_blank(peek());
    loose = is_yaml_blank(peek());
    if (any && !folds) out += '\n';
    if (any && folds && empty_lines == 0) out += ' ';
    out.append(empty_lines, '\n');
    empty_lines = 0;
    const size_t end = std::min(characters_.find('\n', here_), characters_.size());
    out.append(characters_, here_, end - here_);
    here_ = end;
    any = true;
    broken = !at_end();
    if (broken) advance();
  }
  if (header.chomping != '-' && any && broken) out += '\n';
  if (header.chomping == '+') out.append(empty_lines, '\n');
  return out;
}

}  // namespace kt::inline texts
