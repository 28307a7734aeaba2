#include "terminal/amounts.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "base/text.h"

namespace kt::inline terminal {
namespace {

struct Unit {
  std::string_view name;
  double bytes;
};
constexpr Unit kUnits[] = {{"", 1},          {"b", 1},
                           {"k", 1024},      {"kb", 1e3},
                           {"kib", 1024},    {"m", 1 << 20},
                           {"mb", 1e6},      {"mib", 1 << 20},
                           {"g", 1 << 30},   {"gb", 1e9},
                           {"gib", 1 << 30}, {"t", 1099511627776.0},
                           {"tb", 1e12},     {"tib", 1099511627776.0}};

}  // namespace

uint64_t parse_bytes(std::string_view value, std::string_view name) {
  const std::string copy(value);
  double number = 0;
  const auto [end, code] = std::from_chars(copy.data(), copy.data() + copy.size(), number);
  std::string unit;
  for (const char* at = end; *at; ++at)
    if (*at != ' ') unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*at)));
  for (const Unit& known : kUnits) {
    if (known.name != unit || code != std::errc()) continue;
    const double bytes = number * known.bytes;
    if (!(bytes >= 1 && bytes < 9e18)) break;
    return static_cast<uint64_t>(bytes);
  }
  fail("{}: expected a size such as 8GiB or 40GB, got '{}'", name, value);
}

std::string duration(double seconds) {
  const auto whole = static_cast<int64_t>(std::llround(std::min(seconds, 1e9)));
  const auto two = [](int64_t n) { return (n < 10 ? "0" : "") + std::to_string(n); };
  if (whole < 60) return text("{}s", whole);
  if (whole < 3600) return text("{}m{}s", whole / 60, two(whole % 60));
  return text("{}h{}m", whole / 3600, two(whole / 60 % 60));
}

}  // namespace kt::inline terminal
