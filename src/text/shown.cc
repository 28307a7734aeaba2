#include "text/shown.h"

#include "base/text.h"

namespace kt {

std::string shown(std::string_view untrusted) {
  constexpr size_t kMost = 200;
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const char c : untrusted.substr(0, kMost)) {
    const auto code = static_cast<unsigned char>(c);
    if (code >= 0x20 && code != 0x7f)
      out += c;
    else
      out += {'\\', 'x', kDigits[code >> 4], kDigits[code & 15]};
  }
  if (untrusted.size() > kMost) out += "...";
  return out;
}

std::string shown_list(std::span<const std::string> names, size_t most) {
  std::string out;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i == most) return out + text(" and {} more", names.size() - most);
    if (i > 0) out += ", ";
    out += shown(names[i]);
  }
  return out;
}

}  // namespace kt
