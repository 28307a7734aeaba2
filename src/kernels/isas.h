// The ISAs this build holds, for reports and tests.
#pragma once
#include <vector>

#include "kernels/table.h"

namespace kt::inline kernels {

struct IsaStatus {
  const Kernels* table;
  const char* missing;  // the first CPU feature it lacks here, or null: it runs
};
std::vector<IsaStatus> isas();  // from portable to the best

// Every ISA of this CPU family, in the same order, also those that this build leaves out (KT_ISAS of the build).
struct KnownIsa {
  const char* name;
  const Kernels* table;  // null: left out
  const char* missing;   // as above
};
std::vector<KnownIsa> known_isas();

// A table that is no row of this build but a test's: what belongs to it is found from now on. isas() and best_kernels()
// do not name it. Before other threads ask.
struct GramKernels;
struct BackKernels;
void know_table(const Kernels& table, const GramKernels& gram, const BackKernels& back);

}  // namespace kt::inline kernels
