// Prints the best ISA that this CPU runs. Not part of the library: the build runs it before there are any kernels, to
// compile that one (isa.cmake, KT_ISAS=native).
#include <cstdio>

#include "kernels/isa_needs.h"

int main() {
  std::string_view best;
  for (const kt::IsaNeeds& needs : kt::isa_needs())
    if (!kt::missing_feature(needs)) best = needs.isa;
  std::printf("%.*s", static_cast<int>(best.size()), best.data());
}
