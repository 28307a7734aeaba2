#include "text/yaml_text.h"

#include <algorithm>

namespace kt::inline texts {
namespace {

constexpr std::string_view kFlowIndicators = ",[]{}";

std::string with_plain_line_breaks(std::string_view characters) {
  std::string out;
  out.reserve(characters.size());
  for (size_t i = 0; i < characters.size(); ++i) {
    const bool carriage_return = characters[i] == '\r';
    if (carriage_return && i + 1 < characters.size() && characters[i + 1] == '\n') continue;
    out += carriage_return ? '\n' : characters[i];
  }
  return out;
}

}  // namespace

YamlText::YamlText(std::string_view characters, std::string_view name) : name_(name) {
  if (characters.starts_with("\xEF\xBB\xBF")) characters.remove_prefix(3);  // a byte order mark
  characters_ = with_plain_line_breaks(characters);
  check_characters();
}

void YamlText::check_characters() const {
  for (size_t at = 0; at < characters_.size();) {
    const auto c = static_cast<unsigned char>(characters_[at]);
    if ((c >= 0x20 && c < 0x7F) || c == '\t' || c == '\n') {
      ++at;
      continue;
    }
    const Utf8Step step = decode_utf8(std::string_view(characters_).substr(at));
    if (!step.valid) fail_at(at, "found a byte {}, expected UTF-8", static_cast<int>(c));
    const CodePoint code = step.code;
    if ((code < 0xA0 && code != 0x85) || code == 0xFFFE || code == 0xFFFF)
      fail_at(at, "found the character of code {}, expected printable text", code);
    at += step.bytes;
  }
}

std::string YamlText::position_text(size_t place) const {
  const auto begin = characters_.begin(), end = begin + static_cast<ptrdiff_t>(place);
  const auto lines = std::count(begin, end, '\n');
  const auto line_start = std::find(std::make_reverse_iterator(end), characters_.rend(), '\n').base();
  const auto columns =
      std::count_if(line_start, end, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
  return text("{}:{}:{}: ", name_, lines + 1, columns + 1);
}

void YamlText::fail_expecting(std::string_view expected) const {
  const auto found = [&]() -> std::string {
    if (at_end()) return "the end of the file";
    if (peek() == '\n') return "the end of the line";
    if (peek() == '\t') return "a tab";
    const std::string_view left = std::string_view(characters_).substr(here_);
    return text("\"{}\"", left.substr(0, decode_utf8(left).bytes));
  };
  fail_at(here_, "found {}, expected {}", found(), expected);
}

int YamlText::column() const {
  const size_t line_break = here_ == 0 ? characters_.npos : characters_.rfind('\n', here_ - 1);
  return static_cast<int>(line_break == characters_.npos ? here_ : here_ - line_break - 1);
}

int YamlText::line_breaks(size_t from, size_t to) const {
  const auto begin = characters_.begin();
  return static_cast<int>(
      std::count(begin + static_cast<ptrdiff_t>(from), begin + static_cast<ptrdiff_t>(to), '\n'));
}

bool YamlText::has_line_break_since(size_t place) const {
  return std::string_view(characters_).substr(place, here_ - place).find('\n') != std::string_view::npos;
}

bool YamlText::is_blank_at(size_t ahead) const {
  const char c = peek(ahead);
  return is_yaml_blank(c) || c == '\n' || c == '\0';
}

bool YamlText::at_comment() const {
  return peek() == '#' &&
         (here_ == 0 || is_yaml_blank(characters_[here_ - 1]) || characters_[here_ - 1] == '\n');
}

bool YamlText::at_document_marker() const {
  const std::string_view three = std::string_view(characters_).substr(here_, 3);
  return (three == "---" || three == "...") && is_blank_at(3) &&
         (here_ == 0 || characters_[here_ - 1] == '\n');
}

bool YamlText::skip_blanks() {
  bool tab = false;
  for (; is_yaml_blank(peek()); advance()) tab |= peek() == '\t';
  return tab;
}

void YamlText::end_line() {
  skip_blanks();
  if (at_comment()) here_ = std::min(characters_.find('\n', here_), characters_.size());
  if (!at_end() && peek() != '\n') fail_expecting("the end of the line");
}

void YamlText::next_content() {
  for (;; advance()) {
    while (peek() == ' ') advance();
    const size_t indented = here_;
    const bool tab = skip_blanks();
    if (at_comment()) here_ = std::min(characters_.find('\n', here_), characters_.size());
    if (peek() == '\n') continue;
    if (tab && !at_end()) fail_at(indented, "found a tab in the indentation, expected spaces");
    return;
  }
}

void YamlText::next_in_flow() {
  for (;; advance()) {
    skip_blanks();
    if (at_comment()) here_ = std::min(characters_.find('\n', here_), characters_.size());
    if (peek() == '\n') continue;
    if (at_document_marker()) fail_expecting("the end of the [ or { before the document ends");
    return;
  }
}

// Over line breaks and the blanks behind each; how many breaks there were.
size_t YamlText::skip_line_breaks() {
  size_t breaks = 0;
  while (peek() == '\n') {
    ++breaks;
    advance();
    skip_blanks();
  }
  return breaks;
}

// One line break between words is a space; each more is a line break.
void YamlText::append_folded(std::string& out, size_t breaks) {
  if (breaks == 1)
    out += ' ';
  else
    out.append(breaks - 1, '\n');
}

// Plain scalars.

bool YamlText::ends_plain(size_t ahead, YamlStyle style) const {
  const bool flow = style == YamlStyle::kFlow;
  const char c = peek(ahead);
  if (c == '\0' || c == '\n') return true;
  if (flow && kFlowIndicators.find(c) != kFlowIndicators.npos) return true;
  if (c != ':') return false;
  return is_blank_at(ahead + 1) || (flow && kFlowIndicators.find(peek(ahead + 1)) != kFlowIndicators.npos);
}

// To the end of the line or of the scalar, without the blanks before that.
std::string YamlText::plain_characters(YamlStyle style) {
  size_t length = 0;
  for (size_t ahead = 0; !ends_plain(ahead, style); ++ahead) {
    if (is_yaml_blank(peek(ahead))) continue;
    if (peek(ahead) == '#' && ahead > length) break;
    length = ahead + 1;
  }
  here_ += length;
  return characters_.substr(here_ - length, length);
}

std::string YamlText::plain_line(YamlStyle style) {
  constexpr std::string_view kIndicators = ",[]{}#&*!|>'\"%@`";
  const bool lone = (peek() == '-' || peek() == '?' || peek() == ':') &&
                    (is_blank_at(1) || (style == YamlStyle::kFlow && ends_plain(1, style)));
  if (is_blank_at(0) || lone || kIndicators.find(peek()) != kIndicators.npos) fail_expecting("a value");
  return plain_characters(style);
}

std::string YamlText::plain_lines(std::string first_line, YamlStyle style, int parent) {
  const auto carries_on = [&] {
    if (at_comment() || at_document_marker() || ends_plain(0, style)) return false;
    if (style == YamlStyle::kFlow) return true;
    const size_t line_start = characters_.rfind('\n', here_ - 1) + 1;
    return static_cast<int>(characters_.find_first_not_of(' ', line_start) - line_start) > parent;
  };
  std::string out = std::move(first_line);
  for (;;) {
    const size_t end = here_;
    skip_blanks();
    const size_t breaks = skip_line_breaks();
    if (breaks == 0 || !carries_on()) {
      here_ = end;
      return out;
    }
    append_folded(out, breaks);
    out += plain_characters(style);
    if (style == YamlStyle::kFlow) continue;
    const size_t line_end = here_;
    skip_blanks();
    if (at_indicator(':')) fail_expecting("more of the text that began on a line above; or quote it");
    here_ = line_end;
  }
}

}  // namespace kt::inline texts
