// Which kernel tables a test runs, and how much of it. KT_TEST_ISA=<name> keeps that table and portable;
// KT_TEST_FULL=1 runs every shape.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "kernels/isas.h"
#include "kernels/testing/emulated_tiles.h"

namespace kt::inline kernels {

inline bool full_tests() {
  const char* full = std::getenv("KT_TEST_FULL");
  return full && *full && *full != '0';
}

// Portable first: the others are held against it.
inline const std::vector<const Kernels*>& tables_under_test() {
  static const std::vector<const Kernels*> tables = [] {
    const char* only = std::getenv("KT_TEST_ISA");
    const auto wanted = [&](std::string_view name) {
      return !only || !*only || name == only || name == "portable";
    };
    std::vector<const Kernels*> out;
    for (const IsaStatus& isa : isas()) {
      if (isa.missing)
        std::printf("[ not run here ] %s: CPU lacks %s\n", isa.table->name, isa.missing);
      else if (wanted(isa.table->name))
        out.push_back(isa.table);
    }
#ifdef KT_EVERY_TABLE  // emulating takes long: for the kernels themselves
    if (const Kernels* table = emulated_tiles(); table && wanted(table->name)) out.push_back(table);
#endif
    // A run that asks for one table and gets another proves nothing.
    if (only && *only && std::ranges::find(out, std::string_view(only), &Kernels::name) == out.end()) {
      std::printf("KT_TEST_ISA=%s names no table that is compiled and runs here\n", only);
      std::exit(1);
    }
    for (const Kernels* table : out) std::printf("[ runs here     ] %s\n", table->name);
    std::fflush(stdout);
    return out;
  }();
  return tables;
}

}  // namespace kt::inline kernels
