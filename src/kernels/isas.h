// The ISAs this build holds, for reports and tests.
#pragma once
#include <vector>

#include "kernels/table.h"

namespace kt {

struct IsaStatus {
  const Kernels* table;
  const char* missing;  // the first CPU feature it lacks here, or null: it runs
};
std::vector<IsaStatus> isas();  // from portable to the best

}  // namespace kt
