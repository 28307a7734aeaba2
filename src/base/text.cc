#include "base/text.h"

#include <charconv>
#include <cmath>

namespace kt::inline base {

namespace {

template <typename... Number>
void append_chars(std::string& out, Number... number) {
  char digits[64];
  const auto end = std::to_chars(digits, digits + sizeof digits, number...);
  out.append(digits, end.ptr);
}

void append_double(std::string& out, double value) {
  constexpr double kWholeBelow = 1e15;  // every integer below is exact in a double
  if (std::abs(value) < kWholeBelow && value == std::trunc(value) && !(value == 0 && std::signbit(value)))
    return append_chars(out, static_cast<int64_t>(value));
  append_chars(out, value, std::chars_format::general, 6);
}

}  // namespace

void TextArg::append_to(std::string& out) const {
  switch (kind_) {
    case Kind::kBool:
      out += unsigned_ ? "true" : "false";
      break;
    case Kind::kChar:
      out += static_cast<char>(unsigned_);
      break;
    case Kind::kSigned:
      append_chars(out, signed_);
      break;
    case Kind::kUnsigned:
      append_chars(out, unsigned_);
      break;
    case Kind::kDouble:
      append_double(out, double_);
      break;
    case Kind::kString:
      out += string_;
      break;
  }
}

std::string text_from(std::string_view pattern, std::span<const TextArg> args) {
  std::string out;
  out.reserve(pattern.size() + 16 * args.size());
  size_t next = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    const char following = i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (c == '{' && following == '}') {
      if (next < args.size())
        args[next++].append_to(out);
      else
        out += "{}";
      ++i;
    } else {
      out += c;
      if ((c == '{' || c == '}') && following == c) ++i;
    }
  }
  if (next < args.size()) {
    out += " [";
    for (size_t i = next; i < args.size(); ++i) {
      if (i > next) out += ", ";
      args[i].append_to(out);
    }
    out += ']';
  }
  return out;
}

std::string human_bytes(uint64_t bytes) {
  if (bytes < 1024) return text("{} B", bytes);
  constexpr std::string_view kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  // 1023.95 would print as "1024.0"; the next unit says "1.0".
  while (value >= 1023.95 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  std::string out;
  append_chars(out, value, std::chars_format::fixed, 1);
  return out + ' ' + std::string(kUnits[unit]);
}

}  // namespace kt::inline base
