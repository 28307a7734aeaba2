#include "base/utf8.h"

namespace kt::inline base {

Utf8Step decode_utf8(std::string_view bytes) {
  if (bytes.empty()) return {};
  const auto at = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t first = at(0);
  if (first < 0x80) return {.code = first, .bytes = 1, .valid = true};
  const int length = first >= 0xC2 && first < 0xE0   ? 2
                     : first >= 0xE0 && first < 0xF0 ? 3
                     : first >= 0xF0 && first < 0xF5 ? 4
                                                     : 0;
  if (length == 0) return {.bytes = 1};
  // The second byte is what keeps out overlong forms, surrogates and the end of the range.
  const uint8_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  CodePoint code = first & (0x7F >> length);
  for (int i = 1; i < length; ++i) {
    const auto read = static_cast<uint8_t>(i);
    if (static_cast<size_t>(i) == bytes.size()) return {.bytes = read, .cut = true};
    const uint8_t next = at(i);
    if (next < (i == 1 ? low : 0x80) || next > (i == 1 ? high : 0xBF)) return {.bytes = read};
    code = code << 6 | (next & 0x3F);
  }
  return {.code = code, .bytes = static_cast<uint8_t>(length), .valid = true};
}

void append_utf8(std::string& out, CodePoint code) {
  const auto put = [&](CodePoint byte) { out.push_back(static_cast<char>(byte)); };
  if (code < 0x80) return put(code);
  if (code < 0x800) return put(0xC0 | code >> 6), put(0x80 | (code & 0x3F));
  if (code < 0x10000)
    return put(0xE0 | code >> 12), put(0x80 | (code >> 6 & 0x3F)), put(0x80 | (code & 0x3F));
  put(0xF0 | code >> 18), put(0x80 | (code >> 12 & 0x3F)), put(0x80 | (code >> 6 & 0x3F));
  put(0x80 | (code & 0x3F));
}

std::string to_utf8(CodePoint code) {
  std::string out;
  append_utf8(out, code);
  return out;
}

bool is_valid_utf8(std::string_view bytes) {
  for (size_t at = 0; at < bytes.size();) {
    if (static_cast<uint8_t>(bytes[at]) < 0x80) {
      ++at;
      continue;
    }
    const Utf8Step step = decode_utf8(bytes.substr(at));
    if (!step.valid) return false;
    at += step.bytes;
  }
  return true;
}

std::string replace_invalid_utf8(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  while (!bytes.empty()) {
    const Utf8Step step = decode_utf8(bytes);
    out.append(step.valid ? bytes.substr(0, step.bytes) : kReplacement);
    bytes.remove_prefix(step.bytes);
  }
  return out;
}

namespace {

void append_printable(std::string& out, std::string_view bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  while (!bytes.empty()) {
    const Utf8Step step = decode_utf8(bytes);
    if (!step.valid)
      out.append(kReplacement);
    else if (is_control(step.code))
      out.append("\\x").append(1, kDigits[step.code >> 4]).append(1, kDigits[step.code & 15]);
    else
      out.append(bytes.substr(0, step.bytes));
    bytes.remove_prefix(step.bytes);
  }
}

// Whether a character of valid text goes on there.
bool goes_on(std::string_view bytes, size_t at) {
  return at < bytes.size() && (static_cast<uint8_t>(bytes[at]) & 0xC0) == 0x80;
}

}  // namespace

std::string printable(std::string_view untrusted, size_t most) {
  std::string out;
  append_printable(out, untrusted.substr(0, most));
  return untrusted.size() > most ? out + "..." : out;
}

std::string one_line(std::string_view message, size_t most) {
  std::string out;
  if (message.size() <= most) return append_printable(out, message), out;
  size_t head = most / 3 * 2, tail = message.size() - most / 3;
  for (int i = 0; i < 3 && goes_on(message, head); ++i) --head;
  for (int i = 0; i < 3 && goes_on(message, tail); ++i) ++tail;
  append_printable(out, message.substr(0, head));
  out += " ... ";
  append_printable(out, message.substr(tail));
  return out;
}

std::string message_line(std::string_view message) {
  constexpr size_t kMost = 3000;
  return one_line(message, kMost);
}

}  // namespace kt::inline base
