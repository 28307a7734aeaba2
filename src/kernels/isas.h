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

}  // namespace kt::inline kernels
