// How fast matrix units multiply when nothing else is to be done: what products are compared with.
#include "cuda/gpu.h"
#include "cuda/kernels/args.h"

namespace kt::inline cuda {

KT_KERNEL(kt_matrix_peak, MatrixPeakArgs, args, 256) {
  constexpr int kChains = 8;  // that do not wait for each other
  const uint32_t seed = 0x3F803F80u + static_cast<uint32_t>(gpu::thread());
  const gpu::Words a{{seed, seed + 1, seed + 2, seed + 3}};
  const gpu::Words2 b{{seed + 4, seed + 5}};
  float sums[kChains][4] = {};
  KT_UNROLL(1)
  for (int round = 0; round < args.rounds; ++round)
    for (int i = 0; i < kChains; ++i) gpu::multiply_add(sums[i], a, b);
  float all = 0;
  for (int i = 0; i < kChains; ++i)
    for (int s = 0; s < 4; ++s) all += sums[i][s];
  args.out[gpu::block() * gpu::threads() + gpu::thread()] = all;
}

}  // namespace kt::inline cuda
