// Copies of experts for the tokens of prompts: pairs sorted by expert, so that an expert is read and widened once for
// all its tokens, and products on matrix units.
#include "base/checked.h"
#include "base/error.h"
#include "nn/gpu_experts.h"

namespace kt::inline nn {
namespace {

constexpr int kGroupThreads = kMostRouted, kPairThreads = 256;

// Rows behind the last pair that a tile reads.
constexpr int64_t with_tail(int64_t pairs) { return pairs + kTileRows; }

template <typename T>
T* take(uintptr_t& at, int64_t count) {
  auto* const out = reinterpret_cast<T*>(at);
  at += static_cast<uintptr_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 256));
  return out;
}

}  // namespace

struct GpuExperts::PairProduct {
  const Packing& packing;
  size_t first, stride;
  const uint16_t* x;
  float* y;
  const float* bias;
};

// Where a round's rows lie in scratch. Rows that one product gives are read by what follows and then no more: the last
// sums stand where x, gate and up stood.
struct GpuExperts::Round {
  FoundPairs* found;
  int32_t *places, *order;
  RowTile* tiles;
  int64_t most_tiles;
  uint16_t* mid;
  uint16_t* x;
  float *gate, *up, *sums;
  uintptr_t end;
};

GpuExperts::Round GpuExperts::round_at(uintptr_t at, int64_t pairs, int copies) const {
  int64_t width = 0, widest_mid = 0, hidden = 0, hidden_pad = 0;
  for (const Slice& slice : slices_) {
    width = std::max(width, slice.width);
    widest_mid = std::max<int64_t>(widest_mid, slice.down.k_pad);
    hidden = std::max(hidden, slice.down.n);
    hidden_pad = std::max<int64_t>(hidden_pad, slice.gate.k_pad);
  }
  Round out;
  out.found = take<FoundPairs>(at, 1);
  out.places = take<int32_t>(at, pairs);
  out.order = take<int32_t>(at, pairs);
  out.most_tiles = pairs / kTileRows + std::min<int64_t>(copies, pairs);
  out.tiles = take<RowTile>(at, out.most_tiles);
  out.mid = take<uint16_t>(at, with_tail(pairs) * widest_mid);
  uintptr_t second = at;
  out.sums = take<float>(second, pairs * hidden);
  out.x = take<uint16_t>(at, with_tail(pairs) * hidden_pad);
  out.gate = take<float>(at, pairs * width);
  out.up = take<float>(at, pairs * width);
  out.end = std::max(at, second);
  return out;
}

int64_t GpuExperts::many_floats(int tokens, int top_k, int copies, int round) const {
  const int64_t pairs = int64_t{std::min(tokens, round)} * top_k;
  return static_cast<int64_t>(round_at(0, pairs, copies).end / sizeof(float));
}

// y = rows of x times the expert that each belongs to.
void GpuExperts::multiply_pairs(GpuStream& stream, const Round& round, const Slice& slice,
                                const uint8_t* blocks_at, std::span<const PairProduct> products) const {
  ProductsArgs args{.of = {}, .tiles = round.tiles, .found = round.found};
  std::string kernel;
  int blocks = 0;
  const auto launch = [&] {
    if (args.count > 0) stream.launch(kernel, blocks, round.most_tiles, kManyThreads, args);
    args.count = blocks = 0;
  };
  for (const PairProduct& product : products) {
    const Packing& packing = product.packing;
    const std::string mine =
        text("kt_product_many_{}_{}", kernel_word(packing.format.code), packing.fragment.step_bytes);
    if (mine != kernel) launch();
    kernel = mine;
    args.first[args.count] = blocks;
    args.of[args.count++] = {.weights = rows_of(packing, blocks_at, product.first, product.stride),
                             .y = product.y,
                             .y_stride = packing.n,
                             .bias = product.bias,
                             .slot_bytes = static_cast<int64_t>(slice.expert_bytes),
                             .rounded = product.x};
    blocks += static_cast<int>(ceil_div(packing.blocks, kTileColumns / kBlockRows));
  }
  launch();
}

void GpuExperts::run_slice(GpuStream& stream, const Call& call, const Round& round, const Copies& copies,
                           size_t number) const {
  const Slice& slice = slices_[number];
  const Piece& piece = copies.pieces[number];
  const bool first = number == 0;
  const int64_t pairs = int64_t{call.tokens} * call.top_k;
  stream.launch("kt_round_rows", with_tail(pairs), 1, kPairThreads,
                RoundRowsArgs{.from = call.x,
                              .from_stride = call.x_stride,
                              .to = round.x,
                              .width = static_cast<int>(slice.gate.k),
                              .to_width = slice.gate.k_pad,
                              .order = round.order,
                              .found = round.found,
                              .top_k = call.top_k});
  const PairProduct in[] = {{.packing = slice.gate,
                             .first = slice.gate_first,
                             .stride = slice.gate_stride,
                             .x = round.x,
                             .y = round.gate,
                             .bias = piece.gate_bias},
                            {.packing = slice.up,
                             .first = slice.up_first,
                             .stride = slice.up_stride,
                             .x = round.x,
                             .y = round.up,
                             .bias = piece.up_bias}};
  multiply_pairs(stream, round, slice, piece.blocks, in);
  stream.launch("kt_gate_pairs", with_tail(pairs), 1, kPairThreads,
                GatePairsArgs{.gate = round.gate,
                              .up = round.up,
                              .to = round.mid,
                              .width = static_cast<int>(slice.width),
                              .to_width = slice.down.k_pad,
                              .found = round.found,
                              .how = gate_spec()});
  const PairProduct out{.packing = slice.down,
                        .first = slice.down_first,
                        .stride = slice.down.block_bytes,
                        .x = round.mid,
                        .y = round.sums,
                        .bias = first ? copies.down_bias : nullptr};
  multiply_pairs(stream, round, slice, piece.blocks, {&out, 1});
  stream.launch("kt_sum_pairs", call.tokens, 1, kPairThreads,
                SumPairsArgs{.rows = round.sums,
                             .places = round.places,
                             .weights = call.weights,
                             .out = call.out,
                             .out_stride = call.out_stride,
                             .width = static_cast<int>(slice.down.n),
                             .top_k = call.top_k,
                             .add = !first || call.add});
}

void GpuExperts::run_many(GpuStream& stream, const Call& all, const Copies& copies, int most) const {
  for (int done = 0; done < all.tokens; done += most) {
    Call call = all;
    call.tokens = std::min(most, all.tokens - done);
    call.x += done * all.x_stride;
    call.ids += int64_t{done} * all.top_k;
    call.weights += int64_t{done} * all.top_k;
    call.out += done * all.out_stride;
    const int64_t pairs = int64_t{call.tokens} * call.top_k;
    const Round round = round_at(reinterpret_cast<uintptr_t>(call.mid), pairs, copies.count);
    stream.launch("kt_group_pairs", 1, 1, kGroupThreads,
                  GroupPairsArgs{.chosen = chosen(call, copies),
                                 .pairs = static_cast<int>(pairs),
                                 .places = round.places,
                                 .order = round.order,
                                 .tiles = round.tiles,
                                 .found = round.found});
    for (size_t i = 0; i < slices_.size(); ++i) run_slice(stream, call, round, copies, i);
  }
}

}  // namespace kt::inline nn
