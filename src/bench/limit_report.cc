#include "bench/limit_report.h"

#include <cstdio>

#include "base/text.h"
#include "terminal/report.h"

namespace kt::inline bench {
namespace {

std::string padded(std::string_view cell, int width) {  // flush right
  const auto spaces = static_cast<size_t>(width) - std::min(cell.size(), static_cast<size_t>(width));
  return std::string(spaces, ' ').append(cell);
}

std::string columns(std::string_view which, std::string_view us, std::string_view fraction,
                    std::string_view best, std::string_view p90) {
  std::string out(which);
  out.resize(9, ' ');
  return out + " " + padded(us, 9) + " " + padded(fraction, 8) + " " + padded(best, 7) + " " + padded(p90, 7);
}

constexpr double kTolerated = 1.02;  // by which two measurements of one thing differ

std::string share(double fraction) { return fraction > kTolerated ? ">100%" : percent(fraction); }

const char* binding(const LimitFigures& f) { return f.memory_bound ? "memory" : "multiply"; }

}  // namespace

void put_limit(nlohmann::ordered_json& out, const LimitFigures& f) {
  out["limit"] = {{"which", binding(f)},
                  {"us", f.limit_seconds * 1e6},
                  {"read_gb_per_s", f.read_rate / 1e9},
                  {"multiply_tops", f.multiply_rate / 1e12},
                  {"product", product_name(f.product)}};
  out["fraction_of_limit"] = f.fraction;
  out["fraction_of_limit_best"] = f.best_fraction;
  out["fraction_of_limit_p90"] = f.p90_fraction;
}

void put_windows(nlohmann::ordered_json& out, const LimitFigures& f) {
  out["windows"] = f.windows;
  out["windows_discarded"] = f.discarded;
  out["noisy"] = f.noisy;
}

std::string limit_heads() { return columns("limit", "limit us", "of limit", "best", "p90"); }

std::string limit_cells(const LimitFigures& f) {
  return columns(binding(f), fixed(f.limit_seconds * 1e6, 0), share(f.fraction), share(f.best_fraction),
                 share(f.p90_fraction));
}

bool above_limit(const LimitFigures& f) { return f.best_fraction > kTolerated; }

std::string_view limit_note() {
  return ">100%: the limit was measured while something else kept the machine busy, and came out too low.";
}

std::string dropped_cell(const LimitFigures& f) { return text("{}/{}", f.discarded, f.windows); }

std::string remark(const LimitFigures& f) {
  if (f.noisy) return "  noisy: all windows count";
  return f.fraction > kTolerated ? "  limit measured too low" : "";
}

}  // namespace kt::inline bench
