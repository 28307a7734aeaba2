#include "text/metrics/words.h"

#include <algorithm>
#include <iterator>

#include "base/utf8.h"
#include "text/jinja/characters.h"

namespace kt::inline texts {
namespace {

struct CodeSpan {
  CodePoint first, last;
};

bool within(CodePoint code, const auto& spans) {
  return std::ranges::any_of(spans,
                             [&](const CodeSpan& span) { return span.first <= code && code <= span.last; });
}

// The ranges of sacrebleu's zh. Two of them are written there with five digits behind \u, which reads four: they begin
// and end at other characters than was meant, and every published figure has been counted so.
bool is_chinese(CodePoint code) {
  static constexpr CodeSpan kChinese[] = {
      {0x3400, 0x4DB5}, {0x4E00, 0x9FA5}, {0x9FA6, 0x9FBB}, {0xF900, 0xFA2D}, {0xFA30, 0xFA6A},
      {0xFA70, 0xFAD9}, {0x2001, 0x2A6D}, {0x2F81, 0x2FA1}, {0xFF00, 0xFFEF}, {0x2E80, 0x2EFF},
      {0x3000, 0x303F}, {0x31C0, 0x31EF}, {0x2F00, 0x2FDF}, {0x2FF0, 0x2FFF}, {0x3100, 0x312F},
      {0x31A0, 0x31BF}, {0xFE10, 0xFE1F}, {0xFE30, 0xFE4F}, {0x2600, 0x26FF}, {0x2700, 0x27BF},
      {0x3200, 0x32FF}, {0x3300, 0x33FF}};
  return within(code, kChinese);
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  std::string out;
  size_t at = 0;
  for (size_t found; (found = text.find(from, at)) != text.npos; at = found + from.size())
    out.append(text, at, found - at).append(to);
  text = out.append(text, at);
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_stop(char c) { return c == '.' || c == ','; }

// ASCII punctuation but ' , - . (and the space, which is one anyway).
bool stands_alone(char c) {
  return (c >= ' ' && c <= '&') || (c >= '(' && c <= '+') || c == '/' || (c >= ':' && c <= '@') ||
         (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
}

// Wherever `first` and `second` hold for neighbours: `before`, the first, `between`, the second, `behind`. Neither is
// looked at again, so "1-.-" is walked as a regular expression walks it. By bytes: the conditions only name ASCII.
template <typename First, typename Second>
std::string part_pairs(const std::string& text, First first, Second second, const char* before,
                       const char* between, const char* behind) {
  std::string out;
  for (size_t at = 0; at < text.size(); ++at) {
    if (at + 1 < text.size() && first(text[at]) && second(text[at + 1])) {
      out.append(before).append(1, text[at]).append(between).append(1, text[at + 1]).append(behind);
      ++at;
    } else {
      out += text[at];
    }
  }
  return out;
}

TextWords at_spaces(std::string_view text) {
  TextWords out;
  std::string word;
  const auto end = [&] {
    if (!word.empty()) out.push_back(std::move(word));
    word.clear();
  };
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    if (jinja::is_space(next_code_point(text, at)))
      end();
    else
      word.append(text, begin, at - begin);
  }
  end();
  return out;
}

TextWords parted(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (stands_alone(c))
      out.append(1, ' ').append(1, c).append(1, ' ');
    else
      out += c;
  }
  const auto no_digit = [](char c) { return !is_digit(c); };
  const auto dash = [](char c) { return c == '-'; };
  // The second of no_digit may be the first byte of a character: its others follow it.
  out = part_pairs(out, no_digit, is_stop, "", " ", " ");
  out = part_pairs(out, is_stop, no_digit, " ", " ", "");
  out = part_pairs(out, is_digit, dash, "", " ", " ");
  return at_spaces(out);
}

}  // namespace

std::string_view name_of(WordSplit split) { return split == WordSplit::k13a ? "13a" : "zh"; }

TextWords split_words(std::string_view text, WordSplit split) {
  text = jinja::strip_space(text, jinja::Side::kRight);
  if (split == WordSplit::kZh) {
    text = jinja::strip_space(text, jinja::Side::kLeft);
    std::string out;
    for (size_t at = 0; at < text.size();) {
      const size_t begin = at;
      const bool alone = is_chinese(next_code_point(text, at));
      out.append(alone ? " " : "").append(text, begin, at - begin).append(alone ? " " : "");
    }
    return parted(out);
  }
  std::string line(text);
  replace_all(line, "<skipped>", "");
  replace_all(line, "-\n", "");
  replace_all(line, "\n", " ");
  replace_all(line, "&quot;", "\"");
  replace_all(line, "&amp;", "&");
  replace_all(line, "&lt;", "<");
  replace_all(line, "&gt;", ">");
  return parted(" " + line + " ");
}

TextWords alphanumeric_words(std::string_view text, Stemming stemming) {
  // The two characters beyond ASCII whose lower case is or begins with an ASCII letter.
  constexpr CodePoint kDottedI = 0x130, kKelvin = 0x212A;
  TextWords out;
  std::string word;
  const auto end = [&] {
    if (stemming == Stemming::kPorter && word.size() > 3) word = porter_stem(std::move(word));
    if (!word.empty()) out.push_back(std::move(word));
    word.clear();
  };
  for (size_t at = 0; at < text.size();) {
    const CodePoint code = next_code_point(text, at);
    if ((code >= 'a' && code <= 'z') || (code >= '0' && code <= '9')) {
      word += static_cast<char>(code);
    } else if (code >= 'A' && code <= 'Z') {
      word += static_cast<char>(code - 'A' + 'a');
    } else if (code == kKelvin) {
      word += 'k';
    } else {
      if (code == kDottedI) word += 'i';  // and a dot above, which ends the word
      end();
    }
  }
  end();
  return out;
}

}  // namespace kt::inline texts
