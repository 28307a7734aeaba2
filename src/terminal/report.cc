#include "terminal/report.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "base/text.h"

namespace kt::inline terminal {
namespace {

bool colours() {
  static const bool on = [] {
    const char* no = std::getenv("NO_COLOR");
    const char* term = std::getenv("TERM");
    return ::isatty(STDOUT_FILENO) && !(no && *no) && !(term && std::string_view(term) == "dumb");
  }();
  return on;
}

const char* code_of(Ink ink) {
  switch (ink) {
    case Ink::kPlain:
      return "0";
    case Ink::kGood:
      return "32";
    case Ink::kWarning:
      return "33";
    case Ink::kBad:
      return "1;31";
    case Ink::kFaint:
      return "2";
  }
  return "0";
}

}  // namespace

std::string inked(Ink ink, std::string_view string) {
  if (ink == Ink::kPlain || !colours()) return std::string(string);
  return text("\033[{}m{}\033[0m", code_of(ink), string);
}

std::string fixed(double value, int decimals) {
  char out[64];
  std::snprintf(out, sizeof out, "%.*f", decimals, value);
  return out;
}

std::string three_digits(double value) {
  if (!std::isfinite(value)) return "-";
  const double size = std::fabs(value);
  return fixed(value, size >= 100 || size == 0 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : size >= 0.1 ? 3 : 4);
}

std::string percent(double fraction) { return fixed(100 * fraction, 1) + "%"; }

std::string counted(int64_t n, std::string_view what) { return text("{} {}{}", n, what, n == 1 ? "" : "s"); }

std::string Table::str() const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      if (i) line += "  ";
      line += static_cast<int>(i) < left_ ? row[i] + space : space + row[i];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

StatusLine::StatusLine() : terminal_(::isatty(STDERR_FILENO)) {}
StatusLine::~StatusLine() { show(""); }

void StatusLine::show(std::string_view line) {
  if (!terminal_) return;
  std::fprintf(stderr, "\r\033[K%.*s", static_cast<int>(line.size()), line.data());
  std::fflush(stderr);
}

}  // namespace kt::inline terminal
