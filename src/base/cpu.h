// What this CPU can do, asked once. Facts only: which kernels to run is decided elsewhere.
#pragma once

#include <cstddef>
#include <string>

namespace kt::inline base {

// A feature is true when a program may use it now: the CPU has it and the operating system saves its
// registers (XCR0 on x86; for AMX also the kernel's permission, which reading the facts requests for the
// whole process).
struct CpuFacts {
  std::string vendor, model;  // "GenuineIntel", "Intel(R) Xeon(R) ..."; empty when unknown

  // x86-64
  bool avx2 = false, fma = false, f16c = false, avx_vnni = false;
  bool avx512f = false, avx512bw = false, avx512dq = false, avx512vl = false;
  bool avx512_vnni = false, avx512_vbmi = false, avx512_bf16 = false;
  bool amx_tile = false, amx_int8 = false, amx_bf16 = false;

  // arm64
  bool neon = false, dotprod = false, fp16 = false, fhm = false, i8mm = false, bf16 = false, sve = false;

  bool sha256 = false;  // instructions for SHA-256: SHA extensions on x86-64, sha2 on arm64

  size_t l1d = 0, l2 = 0, l3 = 0;  // bytes of the cache that cpu 0 sees at each level; 0 when unknown
};

// Computed on the first call; thread-safe, never throws for an unknown CPU.
const CpuFacts& cpu();

// Tells the core that this is a spin loop (pause, isb): tens of cycles, and a sibling hyperthread runs
// meanwhile.
void cpu_relax() noexcept;

}  // namespace kt::inline base
