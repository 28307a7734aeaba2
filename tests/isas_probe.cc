// Prints a line for each ISA of this CPU family: "avx2 runs", "amx lacks amx_tile", or, for one that is not compiled,
// "amx left amx_tile". For scripts/test.sh, which runs it natively and under an emulator.
#include <cstdio>

#include "kernels/isas.h"

int main() {
  for (const kt::KnownIsa& isa : kt::known_isas())
    std::printf("%s %s %s\n", isa.name,
                !isa.table    ? "left"
                : isa.missing ? "lacks"
                              : "runs",
                isa.missing ? isa.missing : "");
}
