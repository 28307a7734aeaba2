// Experts whose copies are on the GPU: gate and up with the activation behind them, then down with the weighted sum
// over a token's pairs. Who goes where is read from ids on the device: grids depend on the number of tokens alone, and
// a block whose pair has no copy here leaves at once. A result depends on nothing but its token and its pairs. Compiled
// for each code and step as product.cu is.
#include "cuda/kernels/chosen.h"
#include "cuda/kernels/codes.h"
#include "cuda/kernels/gate.h"
#include "cuda/kernels/packed.h"

namespace kt::inline cuda {

constexpr int kInWarps = 3;  // for each of gate and up

// Row `row` of the block, of as many warps in order.
KT_GPU float sum_of_warps(const float* warps, int count, int row) {
  float sum = 0;
  for (int s = 0; s < count; ++s) sum += warps[s * kBlockRows + row];
  return sum;
}

KT_GPU void keep_sums(float* sums, float* warps, int row) {
  add_lanes(sums);
  for (int i = 0; i < kLaneRows; ++i)
    if (gpu::thread() % gpu::kWarp < kRowLanes) warps[gpu::thread() / gpu::kWarp * kBlockRows + row + i] = sums[i];
  gpu::barrier();
}

// Blocks [row blocks, pairs] of 3 warps for gate, then 3 for up; or of 3 for one of them.
template <Code kCode, int kStep>
KT_GPU void experts_in(const ExpertsInArgs& args, float* warps) {
  constexpr int kGroups = kInWarps * gpu::kWarp / kRowLanes;
  const PackedRows& w = args.weights;
  const int pair = gpu::block_y(), slot = slot_of(args.chosen, pair);
  if (slot < 0) return;
  const int row = gpu::thread() % kRowLanes * kLaneRows, group = gpu::thread() / kRowLanes;
  const uint8_t* const block = w.blocks + slot * args.slot_bytes + gpu::block() * w.block_bytes +
                               (group >= kGroups ? args.up_bytes : 0);
  const InputRows x{args.x + pair / args.chosen.top_k * args.x_stride, args.x_stride, 1};
  float sums[1][kLaneRows] = {};
  KT_UNROLL(1)
  for (int piece = group % kGroups; piece < pieces_of<kCode, kStep>(w.k); piece += kGroups)
    add_piece_of_rows<kCode, kStep, 1>(w, block, piece, row, x, sums);
  keep_sums(sums[0], warps, row);
  const int mine = gpu::thread(), column = gpu::block() * kBlockRows + mine;
  if (mine >= kBlockRows || column >= w.n) return;
  const auto bias = [&](const float* all) { return all ? all[slot * args.width + column] : 0.0f; };
  float* const mid = args.mid + pair * args.width + column;
  const float first = sum_of_warps(warps, kInWarps, mine);
  if (args.part == ExpertsInArgs::kBoth)
    *mid = gated(first + bias(args.gate_bias),
                 sum_of_warps(warps + kInWarps * kBlockRows, kInWarps, mine) + bias(args.up_bias), args.gate);
  else
    *mid = args.part == ExpertsInArgs::kGate ? first + bias(args.gate_bias)
                                             : gated(*mid, first + bias(args.up_bias), args.gate);
}

constexpr int kMostOutWarps = 8;

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

// Blocks [row blocks, tokens]. Pieces of all pairs, one behind the other, go to groups of four lanes in turns, so that
// all have something to load whichever of a token's experts are here.
template <Code kCode, int kStep>
KT_GPU void experts_out(const ExpertsOutArgs& args, float* warps, int* found, int* pairs, int* slots) {
  const PackedRows& w = args.weights;
  const int token = gpu::block_y(), count = list_pairs(args.chosen, token, found, pairs, slots);
  const int row = gpu::thread() % kRowLanes * kLaneRows;
  const int pieces = pieces_of<kCode, kStep>(w.k);
  float sums[kLaneRows] = {};
  int piece = gpu::thread() / kRowLanes, at = 0;
  for (;;) {
    while (piece >= pieces) piece -= pieces, ++at;
    if (at >= count) break;
    const int pair = pairs[at];
    const uint8_t* const block = w.blocks + slots[at] * args.slot_bytes + gpu::block() * w.block_bytes;
    float part[1][kLaneRows] = {};
    add_piece_of_rows<kCode, kStep, 1>(w, block, piece, row, {args.mid + pair * args.width, args.width, 1}, part);
    const float weight = args.pair_weights[pair];
    for (int i = 0; i < kLaneRows; ++i) sums[i] = gpu::fma(weight, part[0][i], sums[i]);
    piece += gpu::threads() / kRowLanes;
  }
  keep_sums(sums, warps, row);
  const int mine = gpu::thread(), column = gpu::block() * kBlockRows + mine;
  if (mine >= kBlockRows || column >= w.n) return;
  float y = sum_of_warps(warps, gpu::threads() / gpu::kWarp, mine);
  for (int i = 0; args.bias && i < count; ++i)
    y = gpu::fma(args.pair_weights[pairs[i]], args.bias[int64_t{slots[i]} * w.n + column], y);
  float* const out = args.out + token * args.out_stride + column;
  *out = args.add ? *out + y : y;
}

// kt_experts_in_u4_4: codes u4, steps of 4 bytes.
#define KT_EXPERTS(name, code, step)                                            \
  KT_KERNEL_BESIDE(kt_experts_in_##name##_##step, ExpertsInArgs, args, 192, 3) {          \
    KT_SHARED(float, warps, 2 * kInWarps * kBlockRows);                       \
    experts_in<Code::code, step>(args, warps);                                 \
  }                                                                             \
  KT_KERNEL_BESIDE(kt_experts_out_##name##_##step, ExpertsOutArgs, args, 256, 2) {              \
    KT_SHARED(float, warps, kMostOutWarps * kBlockRows);                      \
    KT_SHARED(int, found, kMostChosen);                                         \
    KT_SHARED(int, pairs, kMostChosen);                                         \
    KT_SHARED(int, slots, kMostChosen);                                         \
    experts_out<Code::code, step>(args, warps, found, pairs, slots);           \
  }

KT_FOR_CODES(KT_EXPERTS)

}  // namespace kt::inline cuda
