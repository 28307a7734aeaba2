// Text as a terminal shows it: how many columns it takes, where one visible character ends, and nothing that
// the terminal would obey. Knows nothing of terminals' own opinions, which differ on emoji made of several
// parts.
#pragma once
#include <string>
#include <string_view>

#include "base/utf8.h"

namespace kt::inline terminal {

// 0 for combining and formatting characters, 2 for East Asian wide ones and emoji, 1 for all others, control
// characters too.
int cell_width(CodePoint code);
int text_width(std::string_view text);  // the sum over valid UTF-8

// What the eye takes for one character: a code point with the zero-width ones behind it, and what a joiner
// joins. `text` is valid UTF-8 and `at` is a boundary.
size_t next_cluster(std::string_view text, size_t at);      // at < text.size()
size_t previous_cluster(std::string_view text, size_t at);  // at > 0

// `text` with spaces behind them to make `width` columns; as they are where they have more.
std::string padded_to(const std::string& text, int width);

// Words in lines of `width` columns, the first behind `lead` and the others below its end; a last line break. Lines end
// at spaces and beside wide characters, but never begin with the punctuation that closes nor end with what opens. What
// is wider than a line has one to itself. Without a width (0) all is one line, as it is.
std::string wrapped(const std::string& lead, std::string_view text, int width);

// Valid UTF-8 without control characters but '\n' and '\t': what others wrote, safe to show.
std::string harmless(std::string_view text);
// The same on one line, cut after some 400 bytes.
std::string harmless_line(std::string_view text);

}  // namespace kt::inline terminal
