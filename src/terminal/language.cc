#include "terminal/language.h"

#include <algorithm>

namespace kt::inline terminal {
namespace {

std::span<const Translation> spoken;

}  // namespace

void speak(std::span<const Translation> table) { spoken = table; }

std::string tr_now(std::string_view english) {
  const auto at = std::ranges::find(spoken, english, &Translation::english);
  return std::string(at == spoken.end() ? english : at->other);
}

std::string tr_counted(int64_t n, std::string_view one, std::string_view many) {
  return text_of(tr_now(n == 1 ? one : many), n);
}

}  // namespace kt::inline terminal
