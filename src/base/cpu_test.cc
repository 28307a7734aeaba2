#include "base/cpu.h"

#include <gtest/gtest.h>

namespace kt::inline base {
namespace {

TEST(Cpu, FactsAreConsistent) {
  const CpuFacts& facts = cpu();
  EXPECT_EQ(&facts, &cpu());
  EXPECT_TRUE(!(facts.avx512bw || facts.avx512vl || facts.avx512_vnni || facts.avx512_bf16) || facts.avx512f);
  EXPECT_TRUE(!(facts.avx512f) || facts.avx2);
  EXPECT_TRUE(!(facts.amx_int8 || facts.amx_bf16) || facts.amx_tile);
  EXPECT_FALSE(facts.avx2 && facts.neon);
  EXPECT_TRUE(!(facts.dotprod || facts.sve) || facts.neon);
  EXPECT_TRUE(facts.l2 == 0 || facts.l1d <= facts.l2);
}

TEST(Cpu, EveryTargetHasItsBaseline) {
  // Whichever of the two 64-bit targets this is, the kernel or cpuid names a vendor.
  EXPECT_FALSE(cpu().vendor.empty());
  cpu_relax();
}

}  // namespace
}  // namespace kt::inline base
