// Kernels over rows of floats: norms, sums, gates, copies.
#include "cuda/gpu.h"
#include "cuda/kernels/args.h"

namespace kt {

KT_GPU float sigmoid_of(float x) { return 1.0f / (1.0f + gpu::exp(-x)); }

// Row `row` of what the host's experts gave, or null.
KT_GPU const float* fetched_row(const FetchedRows& from, int row, int width, uint32_t* seen) {
  if (!from.step || row >= from.step->tokens || *from.cold == 0) return nullptr;
  if (gpu::thread() == 0)
    *seen = gpu::await(from.done, exchange_word(from.step->number, from.layer), kGiveUp);
  gpu::barrier();
  return *seen == kGiveUp ? nullptr : from.rows + int64_t{row} * width;
}

// A block for each row.
KT_KERNEL(kt_norm, NormArgs, args, 1024) {
  KT_SHARED(float, partial, 32);
  KT_SHARED(uint32_t, seen, 1);
  const int row = gpu::block();
  float* const x = args.x + row * args.x_stride;
  const float* const fetched = fetched_row(args.fetched, row, args.width, seen);
  const Addend &first = args.add[0], &second = args.add[1];
  const bool changes = fetched || first.rows || second.rows || args.fresh;
  float sum = 0;
  for (int i = gpu::thread(); i < args.width; i += gpu::threads()) {
    float value = args.fresh ? 0.0f : x[i];
    if (fetched) value += gpu::load_fresh(fetched + i);
    if (first.rows) value += first.rows[row * first.stride + i] * first.scale;
    if (second.rows) value += second.rows[row * second.stride + i] * second.scale;
    if (changes) x[i] = value;
    sum = gpu::fma(value, value, sum);
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

// A block for each row. The last of them to arrive tells the host.
KT_KERNEL(kt_post_rows, PostRowsArgs, args, 256) {
  KT_SHARED(uint32_t, cold, 1);
  const int row = gpu::block();
  const bool live = row < args.step->tokens;
  if (gpu::thread() == 0) *cold = 0;
  gpu::barrier();
  for (int slot = gpu::thread(); live && slot < args.top_k; slot += gpu::threads()) {
    const int64_t at = int64_t{row} * args.top_k + slot;
    const int32_t id = args.ids[at];
    args.to_ids[at] = id;
    args.to_weights[at] = args.weights[at];
    if (id >= 0 && (!args.slots || args.slots[id] < 0)) gpu::add_to(cold, 1);
  }
  for (int i = gpu::thread(); live && i < args.width; i += gpu::threads())
    args.to_x[int64_t{row} * args.width + i] = args.x[row * args.x_stride + i];
  gpu::fence();
  gpu::barrier();
  if (gpu::thread() != 0) return;
  gpu::add_to(args.arrived + 1, *cold);
  gpu::fence();
  if (gpu::add_to(args.arrived, 1) + 1 != static_cast<uint32_t>(gpu::blocks())) return;
  const uint32_t all = gpu::add_to(args.arrived + 1, 0);
  args.arrived[0] = 0;
  args.arrived[1] = 0;
  *args.cold = all;
  gpu::fence();
  if (all > 0 || args.always) gpu::publish(args.posted, exchange_word(args.step->number, args.layer));
}

// One thread, behind all else of a step.
KT_KERNEL(kt_end_step, EndStepArgs, args, 32) {
  if (gpu::thread() == 0) gpu::publish(args.posted, exchange_word(args.step->number, kEndOfStep));
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
