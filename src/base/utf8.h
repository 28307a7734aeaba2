// UTF-8, read strictly: overlong forms, surrogates and what lies past U+10FFFF are invalid. Knows nothing of
// what the characters mean.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace kt::inline base {

using CodePoint = uint32_t;
constexpr CodePoint kLastCodePoint = 0x10FFFF;
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// What stands at the start of some bytes. An invalid sequence has the length of its longest prefix that could
// begin a character (at least 1), the unit Python's errors="replace" turns into one U+FFFD. `cut` says that
// the bytes ended inside a character that could still become valid.
struct Utf8Step {
  CodePoint code = 0;
  uint8_t bytes = 0;  // 0 only for empty input
  bool valid = false;
  bool cut = false;
};
Utf8Step decode_utf8(std::string_view bytes);

// The character at `at`, and its end. Only for text known to be valid, `at` at the start of a character.
inline CodePoint next_code_point(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const CodePoint first = byte(at);
  if (first < 0x80) return ++at, first;
  if (first < 0xE0) return at += 2, (first & 0x1F) << 6 | (byte(at - 1) & 0x3F);
  if (first < 0xF0) return at += 3, (first & 0x0F) << 12 | (byte(at - 2) & 0x3F) << 6 | (byte(at - 1) & 0x3F);
  return at += 4, (first & 0x07) << 18 | (byte(at - 3) & 0x3F) << 12 | (byte(at - 2) & 0x3F) << 6 |
                      (byte(at - 1) & 0x3F);
}

// The start of the character that ends at `at`, in valid text; at > 0.
inline size_t previous_character(std::string_view text, size_t at) {
  do --at;
  while ((static_cast<uint8_t>(text[at]) & 0xC0) == 0x80);
  return at;
}

void append_utf8(std::string& out, CodePoint code);
std::string to_utf8(CodePoint code);

bool is_valid_utf8(std::string_view bytes);
// The text with every invalid sequence replaced by U+FFFD, as Python's bytes.decode("utf-8", "replace") does.
std::string replace_invalid_utf8(std::string_view bytes);

// What a terminal obeys instead of showing: C0, DEL and C1.
constexpr bool is_control(CodePoint code) { return code < 0x20 || (code >= 0x7F && code < 0xA0); }

// Both for one line of an error or a log: control characters as "\x0a", invalid bytes as U+FFFD. More than `most`
// bytes are cut: behind them, as a name is; or in the middle, since the end of a message says what to do.
std::string printable(std::string_view untrusted, size_t most = 100);
std::string one_line(std::string_view message, size_t most);
// What people read of an error or a log: no more of it than they will.
std::string message_line(std::string_view message);

}  // namespace kt::inline base
