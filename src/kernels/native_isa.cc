// Prints the ISAs that this CPU runs as a list of CMake, worst first. Not part of the library: the build runs it before
// there are any kernels, to compile those (isa.cmake, KT_ISAS=native and runnable).
#include <cstdio>

#include "kernels/isa_needs.h"

int main() {
  const char* between = "";
  for (const kt::IsaNeeds& needs : kt::isa_needs()) {
    if (kt::missing_feature(needs)) continue;
    std::printf("%s%.*s", between, static_cast<int>(needs.isa.size()), needs.isa.data());
    between = ";";
  }
}
