// Experts of many tokens on the GPU: pairs of tokens and experts in the order of the experts' copies, tiles of them for
// product_many.cu, the activation between the products and the weighted sums behind them. What a pair gives does not
// depend on its place in that order.
#include "cuda/kernels/chosen.h"
#include "cuda/kernels/gate.h"

namespace kt::inline cuda {

// One block. Thread s sees to slot s.
KT_KERNEL(kt_group_pairs, GroupPairsArgs, args, kMostRouted) {
  KT_SHARED(uint32_t, counts, kMostRouted);
  KT_SHARED(int, begins, kMostRouted);
  const int mine = gpu::thread();
  counts[mine] = 0;
  gpu::barrier();
  for (int pair = mine; pair < args.pairs; pair += gpu::threads()) {
    const int slot = slot_of(args.chosen, pair);
    args.places[pair] = slot < 0 ? -1 : static_cast<int>(gpu::add_to(&counts[slot], 1));
  }
  gpu::barrier();
  int first = 0, tile = 0;
  for (int slot = 0; slot < mine; ++slot) {
    const int count = static_cast<int>(counts[slot]);
    first += count;
    tile += (count + kTileRows - 1) / kTileRows;
  }
  const int count = static_cast<int>(counts[mine]);
  begins[mine] = first;
  for (int done = 0; done < count; done += kTileRows, ++tile)
    args.tiles[tile] = {mine, first + done, count - done < kTileRows ? count - done : kTileRows};
  if (mine == gpu::threads() - 1) args.found->pairs = first + count, args.found->tiles = tile;
  gpu::barrier();
  for (int pair = mine; pair < args.pairs; pair += gpu::threads()) {
    const int slot = slot_of(args.chosen, pair);
    if (slot < 0) continue;
    const int place = begins[slot] + args.places[pair];
    args.places[pair] = place;
    args.order[place] = pair;
  }
}

// Blocks [rows]: a row's activation in bf16, zeros behind its end, and zeros in the rows that a last tile has too many.
KT_KERNEL(kt_gate_pairs, GatePairsArgs, args, 256) {
  const int row = gpu::block(), pairs = args.found->pairs;
  if (row >= pairs + kTileRows) return;
  const int width = row < pairs ? args.width : 0;
  const float* const gate = args.gate + int64_t{row} * args.width;
  const float* const up = args.up + int64_t{row} * args.width;
  uint16_t* const to = args.to + int64_t{row} * args.to_width;
  for (int i = gpu::thread() * 2; i < args.to_width; i += gpu::threads() * 2) {
    const float low = i < width ? gated(gate[i], up[i], args.how) : 0.0f;
    const float high = i + 1 < width ? gated(gate[i + 1], up[i + 1], args.how) : 0.0f;
    *reinterpret_cast<uint32_t*>(to + i) = gpu::bf16_pair(low, high);
  }
}

// Blocks [tokens].
KT_KERNEL(kt_sum_pairs, SumPairsArgs, args, 256) {
  const int token = gpu::block();
  for (int i = gpu::thread(); i < args.width; i += gpu::threads()) {
    float* const out = args.out + token * args.out_stride + i;
    float sum = args.add ? *out : 0.0f;
    for (int pair = token * args.top_k; pair < (token + 1) * args.top_k; ++pair) {
      const int place = args.places[pair];
      if (place >= 0) sum = gpu::fma(args.weights[pair], args.rows[int64_t{place} * args.width + i], sum);
    }
    *out = sum;
  }
}

}  // namespace kt::inline cuda
