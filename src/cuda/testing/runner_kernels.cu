// Kernels for the tests of the test driver alone: what it has to find out.
#include "cuda/gpu.h"

namespace kt::inline cuda {

struct RunnerArgs {
  float* out = nullptr;
};

// out[i] = i + what the thread on the other end of the block has.
KT_GPU void swap_ends(const RunnerArgs& args, float* shared, bool waits) {
  shared[gpu::thread()] = static_cast<float>(gpu::thread());
  if (waits) gpu::barrier();
  args.out[gpu::block() * gpu::threads() + gpu::thread()] =
      static_cast<float>(gpu::thread()) + shared[gpu::threads() - 1 - gpu::thread()];
}

KT_KERNEL(kt_test_barrier, RunnerArgs, args, 128) {
  KT_SHARED(float, shared, 128);
  swap_ends(args, shared, true);
}
KT_KERNEL(kt_test_no_barrier, RunnerArgs, args, 128) {
  KT_SHARED(float, shared, 128);
  swap_ends(args, shared, false);
}
KT_KERNEL(kt_test_uneven_barrier, RunnerArgs, args, 128) {
  if (gpu::thread() > 0) gpu::barrier();
  args.out[gpu::thread()] = 1;
}
KT_KERNEL(kt_test_shuffle, RunnerArgs, args, 128) {
  args.out[gpu::thread()] = gpu::warp_sum(static_cast<float>(gpu::thread()));
}
// out[i] = i + what the lane on the other end of the warp has.
KT_KERNEL(kt_test_warp_barrier, RunnerArgs, args, 128) {
  KT_SHARED(float, shared, 128);
  shared[gpu::thread()] = static_cast<float>(gpu::thread());
  gpu::warp_barrier();
  args.out[gpu::block() * gpu::threads() + gpu::thread()] =
      static_cast<float>(gpu::thread()) + shared[gpu::thread() ^ 31];
}
// Of two bf16, 2 i + 1 and i 2^-133 * 2^120; the first block gives the first, the second block the other.
KT_KERNEL(kt_test_fma_bf16, RunnerArgs, args, 128) {
  const auto i = static_cast<uint32_t>(gpu::thread());
  const uint32_t a = (gpu::bf16_pair(static_cast<float>(i), 0) & 0xFFFFu) | i << 16, b = gpu::bf16_pair(2, 0x1p120f),
                 c = gpu::bf16_pair(1, 0);
  const uint32_t out = gpu::fma_bf16(a, b, c);
  args.out[gpu::block() * gpu::threads() + gpu::thread()] =
      gpu::block() == 0 ? gpu::float_of(out << 16) : gpu::float_of(out & 0xFFFF0000u) * 0x1p13f;
}
// The sum of a lane's four sums, which begin at its number, of ones times rows that are i + 1.
KT_KERNEL(kt_test_multiply_from, RunnerArgs, args, 128) {
  const float lane = static_cast<float>(gpu::thread() % 32), row = static_cast<float>(gpu::thread() % 32 / 4 + 1);
  const uint32_t one = gpu::bf16_pair(1, 1), x = gpu::bf16_pair(row, row);
  const float from[4] = {lane, lane, lane, lane};
  float sums[4];
  gpu::multiply_from(sums, from, {{one, one, one, one}}, {{x, x}});
  args.out[gpu::block() * gpu::threads() + gpu::thread()] = sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace kt::inline cuda
