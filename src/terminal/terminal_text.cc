#include "terminal/terminal_text.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "text/unicode.h"

namespace kt::inline terminal {
namespace {

constexpr CodePoint kJoiner = 0x200D;

// East_Asian_Width W and F of Unicode 14; gaps of unassigned code points are closed.
constexpr CodeRange kWide[] = {
    {0x1100, 0x115F},   {0x231A, 0x231B},   {0x2329, 0x232A},   {0x23E9, 0x23EC},   {0x23F0, 0x23F0},
    {0x23F3, 0x23F3},   {0x25FD, 0x25FE},   {0x2614, 0x2615},   {0x2648, 0x2653},   {0x267F, 0x267F},
    {0x2693, 0x2693},   {0x26A1, 0x26A1},   {0x26AA, 0x26AB},   {0x26BD, 0x26BE},   {0x26C4, 0x26C5},
    {0x26CE, 0x26CE},   {0x26D4, 0x26D4},   {0x26EA, 0x26EA},   {0x26F2, 0x26F3},   {0x26F5, 0x26F5},
    {0x26FA, 0x26FA},   {0x26FD, 0x26FD},   {0x2705, 0x2705},   {0x270A, 0x270B},   {0x2728, 0x2728},
    {0x274C, 0x274C},   {0x274E, 0x274E},   {0x2753, 0x2755},   {0x2757, 0x2757},   {0x2795, 0x2797},
    {0x27B0, 0x27B0},   {0x27BF, 0x27BF},   {0x2B1B, 0x2B1C},   {0x2B50, 0x2B50},   {0x2B55, 0x2B55},
    {0x2E80, 0x303E},   {0x3041, 0x3247},   {0x3250, 0x4DBF},   {0x4E00, 0xA4C6},   {0xA960, 0xA97C},
    {0xAC00, 0xD7A3},   {0xF900, 0xFAFF},   {0xFE10, 0xFE19},   {0xFE30, 0xFE6B},   {0xFF01, 0xFF60},
    {0xFFE0, 0xFFE6},   {0x16FE0, 0x18D08}, {0x1AFF0, 0x1B2FF}, {0x1F004, 0x1F004}, {0x1F0CF, 0x1F0CF},
    {0x1F18E, 0x1F18E}, {0x1F191, 0x1F19A}, {0x1F200, 0x1F320}, {0x1F32D, 0x1F335}, {0x1F337, 0x1F37C},
    {0x1F37E, 0x1F393}, {0x1F3A0, 0x1F3CA}, {0x1F3CF, 0x1F3D3}, {0x1F3E0, 0x1F3F0}, {0x1F3F4, 0x1F3F4},
    {0x1F3F8, 0x1F43E}, {0x1F440, 0x1F440}, {0x1F442, 0x1F4FC}, {0x1F4FF, 0x1F53D}, {0x1F54B, 0x1F54E},
    {0x1F550, 0x1F567}, {0x1F57A, 0x1F57A}, {0x1F595, 0x1F596}, {0x1F5A4, 0x1F5A4}, {0x1F5FB, 0x1F64F},
    {0x1F680, 0x1F6C5}, {0x1F6CC, 0x1F6CC}, {0x1F6D0, 0x1F6D2}, {0x1F6D5, 0x1F6DF}, {0x1F6EB, 0x1F6EC},
    {0x1F6F4, 0x1F6FC}, {0x1F7E0, 0x1F7F0}, {0x1F90C, 0x1F93A}, {0x1F93C, 0x1F945}, {0x1F947, 0x1F9FF},
    {0x1FA70, 0x1FAF6}, {0x20000, 0x3FFFD}};

const CodeSet& zero_width() {
  static const CodeSet set = [] {
    const CodeSet marks = property_set("Mn")->united(*property_set("Me"));
    const CodeSet hangul({{0x1160, 0x11FF}, {0xD7B0, 0xD7FF}});  // vowels and finals join the first consonant
    const CodeSet soft_hyphen({{0xAD, 0xAD}});
    return marks.united(*property_set("Cf")).united(hangul).intersected(soft_hyphen.inverted());
  }();
  return set;
}

CodePoint code_at(std::string_view text, size_t at) { return next_code_point(text, at); }

// A line may end between two pieces.
struct Piece {
  std::string_view text;
  bool spaced = false;  // a space stands before it where they share a line
};

constexpr std::u32string_view kClosing = U"、。，．：；！？）》」』】〕”’…％", kOpening = U"（《「『【〔“‘";

bool is_one_of(std::u32string_view set, CodePoint code) {
  return set.find(static_cast<char32_t>(code)) != set.npos;
}

bool breaks_between(CodePoint before, CodePoint after) {
  if (before == ' ' || after == ' ') return true;
  if (cell_width(before) < 2 && cell_width(after) < 2) return false;
  return !is_one_of(kClosing, after) && !is_one_of(kOpening, before) && cell_width(after) > 0;
}

std::vector<Piece> pieces_of(std::string_view text) {
  std::vector<Piece> out;
  CodePoint before = ' ';
  for (size_t at = 0; at < text.size();) {
    const size_t from = at;
    const CodePoint code = next_code_point(text, at);
    if (code != ' ') {
      if (breaks_between(before, code))
        out.push_back({text.substr(from, at - from), before == ' ' && !out.empty()});
      else
        out.back().text = {out.back().text.data(), out.back().text.size() + at - from};
    }
    before = code;
  }
  return out;
}

}  // namespace

int cell_width(CodePoint code) {
  if (code < 0x300) return 1;
  if (zero_width().contains(code)) return 0;
  const auto* const range = std::ranges::lower_bound(kWide, code, {}, &CodeRange::last);
  return range != std::end(kWide) && range->first <= code ? 2 : 1;
}

int text_width(std::string_view text) {
  int cells = 0;
  for (size_t at = 0; at < text.size();) cells += cell_width(next_code_point(text, at));
  return cells;
}

size_t next_cluster(std::string_view text, size_t at) {
  CodePoint last = next_code_point(text, at);
  if (last == '\n') return at;
  while (at < text.size()) {
    const CodePoint code = code_at(text, at);
    if (code == '\n' || (cell_width(code) != 0 && last != kJoiner)) break;
    last = next_code_point(text, at);
  }
  return at;
}

size_t previous_cluster(std::string_view text, size_t at) {
  at = previous_character(text, at);
  while (at > 0 && code_at(text, at) != '\n') {
    const size_t before = previous_character(text, at);
    const CodePoint code = code_at(text, before);
    if (code == '\n' || (cell_width(code_at(text, at)) != 0 && code != kJoiner)) break;
    at = before;
  }
  return at;
}

std::string padded_to(const std::string& text, int width) {
  return text + std::string(static_cast<size_t>(std::max(0, width - text_width(text))), ' ');
}

std::string wrapped(const std::string& lead, std::string_view text, int width) {
  if (width <= 0) return lead + std::string(text) + "\n";
  const int indent = text_width(lead);
  std::string out = lead;
  int column = indent;
  for (const Piece& piece : pieces_of(text)) {
    const int cells = text_width(piece.text), space = piece.spaced ? 1 : 0;
    if (column > indent && column + space + cells > width) {
      out += "\n" + std::string(static_cast<size_t>(indent), ' ');
      column = indent;
    } else if (piece.spaced) {
      out += ' ';
      ++column;
    }
    out += piece.text;
    column += cells;
  }
  return out + "\n";
}

std::string harmless(std::string_view text) {
  const std::string valid = replace_invalid_utf8(text);
  std::string out;
  for (size_t at = 0; at < valid.size();) {
    const CodePoint code = next_code_point(valid, at);
    if (!is_control(code) || code == '\n' || code == '\t') append_utf8(out, code);
  }
  return out;
}

std::string harmless_line(std::string_view text) {
  constexpr size_t kMost = 400;
  std::string line = harmless(text);
  std::ranges::replace(line, '\n', ' ');
  while (line.ends_with(' ')) line.pop_back();
  if (line.size() <= kMost) return line;
  size_t end = kMost;
  while (end > 0 && (static_cast<uint8_t>(line[end]) & 0xC0) == 0x80) --end;
  return line.substr(0, end) + " ...";
}

}  // namespace kt::inline terminal
