// Experts whose copies are on the GPU: gate and up with the activation behind them, then down with the weighted sum over a
// token's pairs. Who goes where is read from ids on the device: grids depend on the number of tokens alone, and a block
// whose pair has no copy here leaves at once. A result depends on nothing but its token and its pairs. Compiled for each
// code and step as product.cu is.
#include "cuda/kernels/codes.h"
#include "cuda/kernels/gate.h"
#include "cuda/kernels/packed.h"

namespace kt {

constexpr int kInSlices = 8;  // of a row's columns, for each of gate and up

KT_GPU int slot_of(const ChosenExperts& chosen, int pair) {
  const int id = chosen.ids[pair];
  return id < 0 || id >= chosen.experts ? -1 : chosen.slots[id];
}

KT_GPU float sum_of_slices(const float* slices, int count, int row) {
  float sum = 0;
  for (int s = 0; s < count; ++s) sum += slices[s * kBlockRows + row];
  return sum;
}

// Blocks [row blocks, pairs] of 4 warps for gate, then 4 for up; or of 4 for one of them.
template <Code kCode, int kStep>
KT_GPU void experts_in(const ExpertsInArgs& args, float* slices) {
  const PackedRows& w = args.weights;
  const int pair = gpu::block_y(), slot = slot_of(args.chosen, pair);
  if (slot < 0) return;
  const int row = gpu::thread() % kBlockRows, slice = gpu::thread() / kBlockRows;
  const uint8_t* const block = w.blocks + slot * args.slot_bytes + gpu::block() * w.block_bytes +
                               (slice >= kInSlices ? args.up_bytes : 0);
  const InputRows x{args.x + pair / args.chosen.top_k * args.x_stride, args.x_stride, 1};
  float sum = 0;
  for (int chunk = slice % kInSlices; chunk * kChunk < w.k; chunk += kInSlices)
    add_chunk_of_rows<kCode, kStep, 1>(w, block, chunk, row, x, &sum);
  slices[slice * kBlockRows + row] = sum;
  gpu::barrier();
  const int column = gpu::block() * kBlockRows + row;
  if (slice > 0 || column >= w.n) return;
  const auto bias = [&](const float* all) { return all ? all[slot * args.width + column] : 0.0f; };
  float* const mid = args.mid + pair * args.width + column;
  const float first = sum_of_slices(slices, kInSlices, row);
  if (args.part == ExpertsInArgs::kBoth)
    *mid = gated(first + bias(args.gate_bias), sum_of_slices(slices + kInSlices * kBlockRows, kInSlices, row) + bias(args.up_bias),
                 args.gate);
  else
    *mid = args.part == ExpertsInArgs::kGate ? first + bias(args.gate_bias) : gated(*mid, first + bias(args.up_bias), args.gate);
}

constexpr int kMostOutSlices = 40;

// Pairs of the block's token that have a copy here, in the order of its slots; how many. Thread t looks at slot t.
KT_GPU int list_pairs(const ChosenExperts& chosen, int token, int* found, int* pairs, int* slots) {
  const int t = gpu::thread();
  if (t < chosen.top_k) found[t] = slot_of(chosen, token * chosen.top_k + t);
  gpu::barrier();
  int before = 0, count = 0;
  for (int i = 0; i < chosen.top_k; ++i) {
    const int here = found[i] >= 0;
    before += i < t ? here : 0;
    count += here;
  }
  if (t < chosen.top_k && found[t] >= 0) pairs[before] = token * chosen.top_k + t, slots[before] = found[t];
  gpu::barrier();
  return count;
}

// Blocks [row blocks, tokens] of 16 lanes for each slice. Chunks of all pairs, one behind the other, go to slices in turns, so
// that all lanes have something to load whichever of a token's experts are here.
template <Code kCode, int kStep>
KT_GPU void experts_out(const ExpertsOutArgs& args, float* slices, int* found, int* pairs, int* slots) {
  const PackedRows& w = args.weights;
  const int token = gpu::block_y(), count = list_pairs(args.chosen, token, found, pairs, slots);
  const int row = gpu::thread() % kBlockRows, slice = gpu::thread() / kBlockRows, all = gpu::threads() / kBlockRows;
  const int chunks = (w.k + kChunk - 1) / kChunk;
  float sum = 0;
  int chunk = slice, at = 0;
  for (;;) {
    while (chunk >= chunks) chunk -= chunks, ++at;
    if (at >= count) break;
    const int pair = pairs[at];
    const uint8_t* const block = w.blocks + slots[at] * args.slot_bytes + gpu::block() * w.block_bytes;
    float part = 0;
    add_chunk_of_rows<kCode, kStep, 1>(w, block, chunk, row, {args.mid + pair * args.width, args.width, 1}, &part);
    sum = gpu::fma(args.pair_weights[pair], part, sum);
    chunk += all;
  }
  slices[slice * kBlockRows + row] = sum;
  gpu::barrier();
  const int column = gpu::block() * kBlockRows + row;
  if (slice > 0 || column >= w.n) return;
  float y = sum_of_slices(slices, all, row);
  for (int i = 0; args.bias && i < count; ++i)
    y = gpu::fma(args.pair_weights[pairs[i]], args.bias[int64_t{slots[i]} * w.n + column], y);
  float* const out = args.out + token * args.out_stride + column;
  *out = args.add ? *out + y : y;
}

// kt_experts_in_u4_4: codes u4, steps of 4 bytes.
#define KT_EXPERTS(name, code, step)                                            \
  KT_KERNEL_BESIDE(kt_experts_in_##name##_##step, ExpertsInArgs, args, 256, 3) {          \
    KT_SHARED(float, slices, 2 * kInSlices * kBlockRows);                       \
    experts_in<Code::code, step>(args, slices);                                 \
  }                                                                             \
  KT_KERNEL(kt_experts_out_##name##_##step, ExpertsOutArgs, args, 640) {              \
    KT_SHARED(float, slices, kMostOutSlices * kBlockRows);                      \
    KT_SHARED(int, found, kMostChosen);                                         \
    KT_SHARED(int, pairs, kMostChosen);                                         \
    KT_SHARED(int, slots, kMostChosen);                                         \
    experts_out<Code::code, step>(args, slices, found, pairs, slots);           \
  }

KT_FOR_CODES(KT_EXPERTS)

}  // namespace kt
