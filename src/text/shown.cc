#include "text/shown.h"

#include "base/text.h"
#include "base/utf8.h"

namespace kt {

std::string shown(std::string_view untrusted) { return printable(untrusted, 200); }

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
