// Experts whose copies are on the GPU, as experts.cu has them, with operands in bf16: a pair's row of x on matrix
// units, which takes codes as they arrive. One row of eight is alive there; what counts is that weights are read at the
// speed of memory. A result depends on nothing but its token and its pairs.
#include "cuda/kernels/chosen.h"
#include "cuda/kernels/codes.h"
#include "cuda/kernels/few.h"
#include "cuda/kernels/gate.h"

namespace kt::inline cuda {

// The first row of x: to [warps][row] of a block's memory, in which pieces stood.
KT_GPU float* keep_sums_of_one(const float (&sums)[1][1][4], gpu::Words* memory) {
  auto* const warps = reinterpret_cast<float*>(memory);
  const uint32_t i = lane_of() / 4, j = lane_of() % 4;
  gpu::barrier();
  if (j == 0)
    gpu::store8(warps + gpu::thread() / gpu::kWarp * kBlockRows + 2 * i,
                {{gpu::bits_of(sums[0][0][0]), gpu::bits_of(sums[0][0][2])}});
  gpu::barrier();
  return warps;
}

KT_GPU float sum_of_few_warps(const float* warps, int first, int count, int row) {
  float sum = 0;
  for (int s = first; s < first + count; ++s) sum += warps[s * kBlockRows + row];
  return sum;
}

// Blocks [row blocks, pairs] of four warps for gate, then four for up; or of eight for one of them.
template <Code kCode, int kStep>
KT_GPU void experts_few_in(const ExpertsInArgs& args, gpu::Words* memory) {
  const PackedRows& w = args.weights;
  const int pair = gpu::block_y(), slot = slot_of(args.chosen, pair), warp = gpu::thread() / gpu::kWarp;
  if (slot < 0) return;
  const bool both = args.part == ExpertsInArgs::kBoth;
  const int count = both ? kFewWarps / 2 : kFewWarps;
  const uint8_t* const blocks = w.blocks + slot * args.slot_bytes + (warp >= count ? args.up_bytes : 0);
  float sums[1][1][4] = {};
  sum_pieces(w, PieceCopies<kCode, 1>(w, blocks, gpu::block()),
             FewInput<kCode, kStep, 1>(args.x + pair / args.chosen.top_k * args.x_stride, args.x_stride, 1, w.k),
             OneMatrix{warp % count, few_pieces<kCode>(w.k), count}, memory + warp * kWarpWords<kCode, 1>, sums);
  const float* const warps = keep_sums_of_one(sums, memory);
  const int mine = gpu::thread(), column = gpu::block() * kBlockRows + mine;
  if (mine >= kBlockRows || column >= w.n) return;
  const auto bias = [&](const float* all) { return all ? all[slot * args.width + column] : 0.0f; };
  float* const mid = args.mid + pair * args.width + column;
  const float first = sum_of_few_warps(warps, 0, count, mine);
  if (both)
    *mid = gated(first + bias(args.gate_bias),
                 sum_of_few_warps(warps, count, count, mine) + bias(args.up_bias), args.gate);
  else
    *mid = args.part == ExpertsInArgs::kGate ? first + bias(args.gate_bias)
                                             : gated(*mid, first + bias(args.up_bias), args.gate);
}

// A token's pairs that have a copy here, as the block found them.
struct FoundHere {
  int pairs[kMostChosen], slots[kMostChosen];
  float weights[kMostChosen];
};

// Pieces of all pairs, one behind the other.
struct PairsOfToken {
  const FoundHere& found;
  int64_t slot_bytes, width;
  int count, pieces, piece, at;

  KT_GPU void settle() {
    while (piece >= pieces && at < count) piece -= pieces, ++at;
  }
  KT_GPU bool there() const { return at < count; }
  KT_GPU void next() {
    piece += kFewWarps;
    settle();
  }
  KT_GPU int64_t weights_further() const { return found.slots[at] * slot_bytes; }
  KT_GPU int64_t x_further() const { return found.pairs[at] * width; }
  KT_GPU float times() const { return found.weights[at]; }
};

// Blocks [row blocks, tokens]. A pair's weight goes to its row of x, so that all pairs have one sum.
template <Code kCode, int kStep>
KT_GPU void experts_few_out(const ExpertsOutArgs& args, FoundHere& found, gpu::Words* memory) {
  const PackedRows& w = args.weights;
  const int token = gpu::block_y(), warp = gpu::thread() / gpu::kWarp, top_k = args.chosen.top_k, t = gpu::thread();
  int count = 0;
  for (int k = 0; k < top_k; ++k) {
    const int slot = slot_of(args.chosen, token * top_k + k);
    if (slot < 0) continue;
    if (k == t) {
      const int pair = token * top_k + k;
      found.pairs[count] = pair, found.slots[count] = slot, found.weights[count] = args.pair_weights[pair];
    }
    ++count;
  }
  gpu::barrier();
  PairsOfToken walk{found, args.slot_bytes, args.width, count, few_pieces<kCode>(w.k), warp, 0};
  walk.settle();
  float sums[1][1][4] = {};
  sum_pieces(w, PieceCopies<kCode, 1>(w, w.blocks, gpu::block()),
             FewInput<kCode, kStep, 1>(args.mid, args.width, 1, w.k), walk, memory + warp * kWarpWords<kCode, 1>, sums);
  const float* const warps = keep_sums_of_one(sums, memory);
  const int column = gpu::block() * kBlockRows + t;
  if (t >= kBlockRows || column >= w.n) return;
  float y = sum_of_few_warps(warps, 0, kFewWarps, t);
  for (int i = 0; args.bias && i < count; ++i)
    y = gpu::fma(found.weights[i], args.bias[int64_t{found.slots[i]} * w.n + column], y);
  float* const out = args.out + token * args.out_stride + column;
  *out = args.add ? *out + y : y;
}

// kt_experts_few_in_u4_4: codes u4, steps of 4 bytes.
#define KT_EXPERTS_FEW(name, code, step)                                                       \
  KT_KERNEL_BESIDE(kt_experts_few_in_##name##_##step, ExpertsInArgs, args, kFewThreads, 2) {   \
    KT_SHARED(gpu::Words, memory, (kFewWarps * kWarpWords<Code::code, 1>));                    \
    experts_few_in<Code::code, step>(args, memory);                                            \
  }                                                                                            \
  KT_KERNEL_BESIDE(kt_experts_few_out_##name##_##step, ExpertsOutArgs, args, kFewThreads, 2) { \
    KT_SHARED(gpu::Words, memory, (kFewWarps * kWarpWords<Code::code, 1>));                    \
    KT_SHARED(FoundHere, found, 1);                                                            \
    experts_few_out<Code::code, step>(args, *found, memory);                                   \
  }

KT_FOR_ROUNDED_CODES(KT_EXPERTS_FEW)

}  // namespace kt::inline cuda
