// Kernels over rows of floats: norms, sums, gates, copies.
#include "cuda/gpu.h"
#include "cuda/kernels/args.h"

namespace kt {

KT_GPU float sigmoid_of(float x) { return 1.0f / (1.0f + gpu::exp(-x)); }

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

KT_GPU float gated(float gate, float up, const GateArgs& args) {
  if (args.kind == 0) {  // ActivationKind::kSwiGlu
    if (args.limit > 0) {
      gate = gate < args.limit ? gate : args.limit;
      up = up < args.limit ? up : args.limit;
      up = up > -args.limit ? up : -args.limit;
    }
    if (args.alpha > 0) return gate * sigmoid_of(gate * args.alpha) * (up + 1.0f);
    return gate * sigmoid_of(gate) * up;
  }
  if (args.kind == 1) {  // kGeluTanh: 0.5 (1 + tanh(z)) = sigmoid(2 z)
    const float z = gpu::fma(gate * gate * gate, 0.044715f, gate) * 1.5957691216f;
    return gate * sigmoid_of(z) * up;
  }
  return 0.5f * gate * (1.0f + gpu::erf(gate * 0.70710678f)) * up;
}

KT_KERNEL(kt_gate, GateArgs, args, 256) {
  const int64_t i = int64_t{gpu::block()} * gpu::threads() + gpu::thread();
  if (i < args.count) args.mid[i] = gated(args.gate[i], args.up[i], args);
}

}  // namespace kt
