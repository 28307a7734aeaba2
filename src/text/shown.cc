#include "text/shown.h"

#include <algorithm>

#include "base/text.h"
#include "base/utf8.h"

namespace kt::inline texts {

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

std::string nearest_name(std::string_view untrusted, const std::vector<std::string>& known) {
  const std::string_view name = untrusted.substr(0, 100);
  const auto distance = [&](std::string_view other) {
    // Rows of the usual table: before last, last, this.
    std::vector<size_t> before(other.size() + 1), last(other.size() + 1), row(other.size() + 1);
    for (size_t j = 0; j <= other.size(); ++j) last[j] = j;
    for (size_t i = 1; i <= name.size(); ++i) {
      row[0] = i;
      for (size_t j = 1; j <= other.size(); ++j) {
        const bool same = name[i - 1] == other[j - 1];
        row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (same ? 0 : 1)});
        if (i > 1 && j > 1 && name[i - 1] == other[j - 2] && name[i - 2] == other[j - 1])
          row[j] = std::min(row[j], before[j - 2] + 1);
      }
      before.swap(last);
      last.swap(row);
    }
    return last[other.size()];
  };
  const auto best = std::ranges::min_element(known, {}, distance);
  return best == known.end() ? "" : *best;
}

std::string_view json_kind(const Json& value) {
  if (value.is_string()) return "text";
  if (value.is_boolean()) return "true or false";
  if (value.is_number_integer()) return "an integer";
  if (value.is_number()) return "a number";
  if (value.is_array()) return "a list";
  if (value.is_object()) return "a mapping";
  return "nothing";
}

}  // namespace kt::inline texts
