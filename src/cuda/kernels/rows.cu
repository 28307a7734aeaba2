// Kernels over rows of floats: norms, sums, gates, copies.
#include "cuda/kernels/gate.h"

namespace kt {

// A block for each row.
KT_KERNEL(kt_norm, NormArgs, args, 256) {
  KT_SHARED(float, partial, 8);
  float* const x = args.x + gpu::block() * args.x_stride;
  float sum = 0;
  for (int i = gpu::thread(); i < args.width; i += gpu::threads()) {
    if (args.add) x[i] += args.add[gpu::block() * args.add_stride + i] * args.add_scale;
    sum = gpu::fma(x[i], x[i], sum);
  }
  if (!args.out) return;
  const float mean = gpu::block_sum(sum, partial) / static_cast<float>(args.width);
  const float factor = 1.0f / gpu::sqrt(mean + args.eps);
  float* const out = args.out + gpu::block() * args.out_stride;
  for (int i = gpu::thread(); i < args.width; i += gpu::threads()) out[i] = x[i] * factor * args.weight[i];
}

KT_KERNEL(kt_sigmoid, SigmoidArgs, args, 256) {
  const int64_t i = int64_t{gpu::block()} * gpu::threads() + gpu::thread();
  if (i < args.count) args.x[i] = sigmoid_of(args.x[i]);
}

// Blocks [heads, rows].
KT_KERNEL(kt_copy_heads, CopyHeadsArgs, args, 256) {
  const float* const from = args.from + gpu::block_y() * args.from_width + gpu::block() * args.from_stride;
  float* const to = args.to + gpu::block_y() * args.to_width + gpu::block() * args.to_stride;
  for (int i = gpu::thread(); i < args.count; i += gpu::threads()) to[i] = from[i];
}

// A block for each row that is picked.
KT_KERNEL(kt_pick, PickArgs, args, 256) {
  const float* const from = args.from + args.rows[gpu::block()] * args.width;
  float* const to = args.to + gpu::block() * args.width;
  for (int64_t i = gpu::thread(); i < args.width; i += gpu::threads()) to[i] = from[i];
}

KT_KERNEL(kt_gate, GateArgs, args, 256) {
  const int64_t i = int64_t{gpu::block()} * gpu::threads() + gpu::thread();
  if (i < args.count) args.mid[i] = gated(args.gate[i], args.up[i], {args.kind, args.limit, args.alpha});
}

}  // namespace kt
