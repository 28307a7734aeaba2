// Kernels for the tests of the test driver alone: what it has to find out.
#include "cuda/gpu.h"

namespace kt {

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

}  // namespace kt
