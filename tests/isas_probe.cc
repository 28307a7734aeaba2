// Prints a line for each ISA of this build: "avx2 runs" or "amx lacks amx_tile". For scripts/test.sh, which
// runs it natively and under an emulator.
#include <cstdio>

#include "kernels/isas.h"

int main() {
  for (const kt::IsaStatus& isa : kt::isas())
    std::printf("%s %s%s\n", isa.table->name, isa.missing ? "lacks " : "runs",
                isa.missing ? isa.missing : "");
}
