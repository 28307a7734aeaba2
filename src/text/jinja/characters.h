// Text as Python sees it: code points over UTF-8, case, white space, quoting, numbers in digits. A byte that
// is not part of valid UTF-8 counts as one character and passes through.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline texts::jinja {

// Bytes of the character at `at` (at least 1; `at` lies inside).
size_t character_bytes(std::string_view s, size_t at);
// Its code point; a stray byte b gives 0xDC00 + b, which no valid text holds.
uint32_t code_point(std::string_view s, size_t at);
void append_code_point(std::string& out, uint32_t point);

size_t count_characters(std::string_view s);
bool is_ascii(std::string_view s);
std::vector<std::string_view> characters(std::string_view s);
// Characters [first, last) as bytes of s.
std::string_view character_range(std::string_view s, size_t first, size_t last);

bool is_space(uint32_t point);
// Case of ASCII, Latin, Greek and Cyrillic letters that map one to one; others stay.
uint32_t upper_point(uint32_t point);
uint32_t lower_point(uint32_t point);
std::string upper(std::string_view s);
std::string lower(std::string_view s);
std::string capitalize(std::string_view s);
std::string title(std::string_view s);  // str.title()

enum class Side { kLeft = 1, kRight = 2, kBoth = 3 };
// Without the characters of `chars` at its ends.
std::string_view strip(std::string_view s, std::string_view chars, Side side);
std::string_view strip_space(std::string_view s, Side side);
std::vector<std::string_view> split_lines(std::string_view s);

// Offset of the first `what` at or after `from`, else npos. Linear in both lengths whatever they hold.
size_t find_bytes(std::string_view s, std::string_view what, size_t from = 0);

// 'it\'s' as Python writes a string literal.
std::string quote(std::string_view s);
// 1.0, 1e+16, 0.1: the shortest digits that read back, laid out as Python does.
std::string float_digits(double v);

}  // namespace kt::inline texts::jinja
