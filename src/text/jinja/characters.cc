#include "text/jinja/characters.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

namespace kt::inline texts::jinja {

namespace {

constexpr uint32_t kStray = 0xDC00;

bool continues(std::string_view s, size_t at) {
  return at < s.size() && (static_cast<unsigned char>(s[at]) & 0xC0) == 0x80;
}

}  // namespace

size_t character_bytes(std::string_view s, size_t at) {
  const auto b = static_cast<unsigned char>(s[at]);
  size_t length = b < 0xC2 ? 1 : b < 0xE0 ? 2 : b < 0xF0 ? 3 : b < 0xF5 ? 4 : 1;
  for (size_t i = 1; i < length; ++i) {
    if (!continues(s, at + i)) return 1;
  }
  return length;
}

uint32_t code_point(std::string_view s, size_t at) {
  const size_t length = character_bytes(s, at);
  const auto b = static_cast<unsigned char>(s[at]);
  if (length == 1) return b < 0x80 ? b : kStray + b;
  uint32_t point = b & (0xFF >> (length + 1));
  for (size_t i = 1; i < length; ++i) point = point << 6 | (static_cast<unsigned char>(s[at + i]) & 0x3F);
  return point;
}

void append_code_point(std::string& out, uint32_t point) {
  if (point < 0x80) {
    out += static_cast<char>(point);
  } else if (point >= kStray && point < kStray + 0x100) {
    out += static_cast<char>(point - kStray);
  } else if (point < 0x800) {
    out += static_cast<char>(0xC0 | point >> 6);
    out += static_cast<char>(0x80 | (point & 0x3F));
  } else if (point < 0x10000) {
    out += static_cast<char>(0xE0 | point >> 12);
    out += static_cast<char>(0x80 | (point >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (point & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | point >> 18);
    out += static_cast<char>(0x80 | (point >> 12 & 0x3F));
    out += static_cast<char>(0x80 | (point >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (point & 0x3F));
  }
}

bool is_ascii(std::string_view s) {
  return std::all_of(s.begin(), s.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

size_t count_characters(std::string_view s) {
  if (is_ascii(s)) return s.size();
  size_t count = 0;
  for (size_t at = 0; at < s.size(); at += character_bytes(s, at)) ++count;
  return count;
}

std::vector<std::string_view> characters(std::string_view s) {
  std::vector<std::string_view> out;
  for (size_t at = 0; at < s.size();) {
    const size_t length = character_bytes(s, at);
    out.push_back(s.substr(at, length));
    at += length;
  }
  return out;
}

std::string_view character_range(std::string_view s, size_t first, size_t last) {
  if (first >= last) return {};
  if (is_ascii(s)) return s.substr(first, last - first);
  size_t at = 0, count = 0;
  for (; at < s.size() && count < first; ++count) at += character_bytes(s, at);
  size_t end = at;
  for (; end < s.size() && count < last; ++count) end += character_bytes(s, end);
  return s.substr(at, end - at);
}

bool is_space(uint32_t p) {
  return (p >= 9 && p <= 13) || (p >= 28 && p <= 32) || p == 0x85 || p == 0xA0 || p == 0x1680 ||
         (p >= 0x2000 && p <= 0x200A) || p == 0x2028 || p == 0x2029 || p == 0x202F || p == 0x205F ||
         p == 0x3000;
}

uint32_t upper_point(uint32_t p) {
  if (p >= 'a' && p <= 'z') return p - 32;
  if (p < 0x80) return p;
  if (p == 0xB5) return 0x39C;
  if (p == 0xFF) return 0x178;
  if (p >= 0xE0 && p <= 0xFE && p != 0xF7) return p - 32;
  if ((p >= 0x100 && p <= 0x137 && p != 0x131) || (p >= 0x14A && p <= 0x177)) return p & ~1u;
  if (p == 0x131) return 'I';
  if ((p >= 0x139 && p <= 0x148) || (p >= 0x179 && p <= 0x17E)) return p % 2 ? p : p - 1;
  if (p == 0x3C2) return 0x3A3;
  if (p >= 0x3B1 && p <= 0x3CB) return p - 32;
  if (p == 0x3AC) return 0x386;
  if (p >= 0x3AD && p <= 0x3AF) return p - 37;
  if (p == 0x3CC) return 0x38C;
  if (p == 0x3CD || p == 0x3CE) return p - 63;
  if (p >= 0x430 && p <= 0x44F) return p - 32;
  if (p >= 0x450 && p <= 0x45F) return p - 80;
  if ((p >= 0x460 && p <= 0x481) || (p >= 0x48A && p <= 0x4BF) || (p >= 0x4D0 && p <= 0x52F)) return p & ~1u;
  return p;
}

uint32_t lower_point(uint32_t p) {
  if (p >= 'A' && p <= 'Z') return p + 32;
  if (p < 0x80) return p;
  if (p >= 0xC0 && p <= 0xDE && p != 0xD7) return p + 32;
  if (p == 0x178) return 0xFF;
  if ((p >= 0x100 && p <= 0x137 && p != 0x130) || (p >= 0x14A && p <= 0x177)) return p | 1u;
  if ((p >= 0x139 && p <= 0x148) || (p >= 0x179 && p <= 0x17E)) return p % 2 ? p + 1 : p;
  if (p >= 0x391 && p <= 0x3AB && p != 0x3A2) return p + 32;
  if (p == 0x386) return 0x3AC;
  if (p >= 0x388 && p <= 0x38A) return p + 37;
  if (p == 0x38C) return 0x3CC;
  if (p == 0x38E || p == 0x38F) return p + 63;
  if (p >= 0x410 && p <= 0x42F) return p + 32;
  if (p >= 0x400 && p <= 0x40F) return p + 80;
  if ((p >= 0x460 && p <= 0x481) || (p >= 0x48A && p <= 0x4BF) || (p >= 0x4D0 && p <= 0x52F)) return p | 1u;
  return p;
}

namespace {

void append_upper(std::string& out, uint32_t p) {
  if (p == 0xDF) {
    out += "SS";  // the one common letter whose capital is two
  } else {
    append_code_point(out, upper_point(p));
  }
}

}  // namespace

std::string upper(std::string_view s) {
  std::string out;
  out.reserve(s.size());
  for (size_t at = 0; at < s.size(); at += character_bytes(s, at)) append_upper(out, code_point(s, at));
  return out;
}

std::string lower(std::string_view s) {
  std::string out;
  out.reserve(s.size());
  for (size_t at = 0; at < s.size(); at += character_bytes(s, at)) {
    append_code_point(out, lower_point(code_point(s, at)));
  }
  return out;
}

std::string capitalize(std::string_view s) {
  if (s.empty()) return {};
  const size_t first = character_bytes(s, 0);
  std::string out;
  const uint32_t p = code_point(s, 0);
  if (p == 0xDF) {
    out = "Ss";
  } else {
    append_code_point(out, upper_point(p));
  }
  return out + lower(s.substr(first));
}

std::string title(std::string_view s) {
  std::string out;
  bool inside = false;
  for (size_t at = 0; at < s.size(); at += character_bytes(s, at)) {
    const uint32_t p = code_point(s, at);
    const bool cased = upper_point(p) != p || lower_point(p) != p || p == 0xDF;
    append_code_point(out, inside ? lower_point(p) : upper_point(p));
    inside = cased;
  }
  return out;
}

namespace {

template <typename Drop>
std::string_view strip_where(std::string_view s, Side side, Drop drop) {
  size_t first = 0, last = s.size();
  if (static_cast<int>(side) & 1) {
    while (first < last && drop(s.substr(first, character_bytes(s, first))))
      first += character_bytes(s, first);
  }
  if (static_cast<int>(side) & 2) {
    while (last > first) {
      size_t at = last - 1;
      while (at > first && last - at < 4 && continues(s, at)) --at;
      if (at + character_bytes(s, at) != last) at = last - 1;
      if (!drop(s.substr(at, last - at))) break;
      last = at;
    }
  }
  return s.substr(first, last - first);
}

}  // namespace

std::string_view strip(std::string_view s, std::string_view chars, Side side) {
  const std::vector<std::string_view> set = characters(chars);
  return strip_where(s, side,
                     [&](std::string_view c) { return std::find(set.begin(), set.end(), c) != set.end(); });
}

std::string_view strip_space(std::string_view s, Side side) {
  return strip_where(s, side, [](std::string_view c) { return is_space(code_point(c, 0)); });
}

std::vector<std::string_view> split_lines(std::string_view s) {
  std::vector<std::string_view> out;
  size_t start = 0;
  for (size_t at = 0; at < s.size();) {
    const size_t length = character_bytes(s, at);
    const uint32_t p = code_point(s, at);
    const bool breaks =
        (p >= 10 && p <= 13) || (p >= 0x1C && p <= 0x1E) || p == 0x85 || p == 0x2028 || p == 0x2029;
    if (breaks) out.push_back(s.substr(start, at - start));
    at += length;
    if (p == '\r' && at < s.size() && s[at] == '\n') ++at;
    if (breaks) start = at;
  }
  if (start < s.size()) out.push_back(s.substr(start));
  return out;
}

size_t find_bytes(std::string_view s, std::string_view what, size_t from) {
  if (from > s.size()) return std::string_view::npos;
  if (what.empty()) return from;
  const void* hit = memmem(s.data() + from, s.size() - from, what.data(), what.size());
  return hit ? static_cast<size_t>(static_cast<const char*>(hit) - s.data()) : std::string_view::npos;
}

std::string quote(std::string_view s) {
  const bool has_single = s.find('\'') != std::string_view::npos;
  const char mark = has_single && s.find('"') == std::string_view::npos ? '"' : '\'';
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out(1, mark);
  for (size_t at = 0; at < s.size(); at += character_bytes(s, at)) {
    const uint32_t p = code_point(s, at);
    if (p == static_cast<unsigned char>(mark) || p == '\\') {
      out += '\\';
      out += static_cast<char>(p);
    } else if (p == '\n') {
      out += "\\n";
    } else if (p == '\r') {
      out += "\\r";
    } else if (p == '\t') {
      out += "\\t";
    } else if (p < 32 || (p >= 0x7F && p <= 0xA0) || p == 0xAD) {
      out += "\\x";
      out += kHex[p >> 4];
      out += kHex[p & 15];
    } else if (p > 0xA0 && (is_space(p) || (p >= 0x200B && p <= 0x200F) || p == 0xFEFF)) {
      out += "\\u";
      for (int shift = 12; shift >= 0; shift -= 4) out += kHex[p >> shift & 15];
    } else {
      append_code_point(out, p);
    }
  }
  return out + mark;
}

std::string float_digits(double v) {
  if (std::isnan(v)) return "nan";
  if (std::isinf(v)) return v < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, v, std::chars_format::scientific).ptr;
  std::string_view all(buffer, static_cast<size_t>(end - buffer));
  std::string out;
  if (all.front() == '-') {
    out = "-";
    all.remove_prefix(1);
  }
  const size_t e = all.find('e');
  std::string digits(1, all[0]);
  if (e > 2) digits += all.substr(2, e - 2);
  all.remove_prefix(all[e + 1] == '+' ? e + 2 : e + 1);  // from_chars() knows no plus
  int exponent = 0;
  std::from_chars(all.data(), all.data() + all.size(), exponent);
  const int count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (count > 1) out += "." + digits.substr(1);
    const std::string size = std::to_string(std::abs(exponent));
    return out + (exponent < 0 ? "e-" : "e+") + (size.size() < 2 ? "0" : "") + size;
  }
  if (exponent < 0) return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  if (count <= exponent + 1)
    return out + digits + std::string(static_cast<size_t>(exponent + 1 - count), '0') + ".0";
  return out + digits.substr(0, static_cast<size_t>(exponent + 1)) + "." +
         digits.substr(static_cast<size_t>(exponent + 1));
}

}  // namespace kt::inline texts::jinja
