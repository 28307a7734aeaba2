// Kernels over rows of floats: norms, sums, gates, copies.
#include "cuda/kernels/gate.h"

namespace kt::inline cuda {

// Row `row` of what the host's experts gave, or null.
KT_GPU const float* fetched_row(const FetchedRows& from, int row, int width, uint32_t* seen) {
  if (!from.step || row >= from.step->tokens || *from.cold == 0) return nullptr;
  if (gpu::thread() == 0) {
    const uint64_t begin = gpu::nanoseconds();
    *seen = gpu::await(from.done, exchange_word(from.step->number, from.layer), kGiveUp);
    if (row == 0) *from.told = *from.waited += gpu::nanoseconds() - begin;
  }
  gpu::barrier();
  return *seen == kGiveUp ? nullptr : from.rows + int64_t{row} * width;
}

KT_GPU uintptr_t number_of(const float* address) { return reinterpret_cast<uintptr_t>(address); }

// Four numbers of a row, from a multiple of four on.
struct FourOfRow {
  float x[4];
};
KT_GPU FourOfRow four_of(const gpu::Words& words) {
  return {{gpu::float_of(words.word[0]), gpu::float_of(words.word[1]), gpu::float_of(words.word[2]),
           gpu::float_of(words.word[3])}};
}
KT_GPU void store_four(float* to, const FourOfRow& from) {
  gpu::store16(to, {{gpu::bits_of(from.x[0]), gpu::bits_of(from.x[1]), gpu::bits_of(from.x[2]),
                     gpu::bits_of(from.x[3])}});
}

// The sum of squares of numbers [i, i + count) of a row, with what is added to them.
struct RowSum {
  const NormArgs& args;
  int row;
  const float* fetched;

  KT_GPU float* x() const { return args.x + row * args.x_stride; }
  KT_GPU const float* added(int which) const { return args.add[which].rows + row * args.add[which].stride; }
  KT_GPU bool changes() const { return fetched || args.add[0].rows || args.add[1].rows || args.fresh; }

  KT_GPU float one(int i) const {
    float value = args.fresh ? 0.0f : x()[i];
    if (fetched) value += gpu::load_fresh(fetched + i);
    for (int a = 0; a < 2; ++a)
      if (args.add[a].rows) value += added(a)[i] * args.add[a].scale;
    if (changes()) x()[i] = value;
    return value * value;
  }
  KT_GPU float four(int i) const {
    FourOfRow value = args.fresh ? FourOfRow{} : four_of(gpu::load16(x() + i));
    const FourOfRow more = fetched ? four_of(gpu::load16_fresh(fetched + i)) : FourOfRow{};
    for (int j = 0; fetched && j < 4; ++j) value.x[j] += more.x[j];
    for (int a = 0; a < 2; ++a) {
      if (!args.add[a].rows) continue;
      const FourOfRow y = four_of(gpu::load16(added(a) + i));
      for (int j = 0; j < 4; ++j) value.x[j] += y.x[j] * args.add[a].scale;
    }
    if (changes()) store_four(x() + i, value);
    float sum = 0;
    for (int j = 0; j < 4; ++j) sum = gpu::fma(value.x[j], value.x[j], sum);
    return sum;
  }
};

// A block for each row.
KT_KERNEL(kt_norm, NormArgs, args, 1024) {
  KT_SHARED(float, partial, 32);
  KT_SHARED(uint32_t, seen, 1);
  const int row = gpu::block();
  const RowSum of{args, row, fetched_row(args.fetched, row, args.width, seen)};
  const int64_t strides =
      args.width | args.x_stride | args.out_stride | args.add[0].stride | args.add[1].stride;
  const bool by_fours =
      strides % 4 == 0 && (number_of(args.x) | number_of(args.out) | number_of(args.weight) |
                           number_of(args.add[0].rows) | number_of(args.add[1].rows)) %
                                  16 ==
                              0;
  float sum = 0;
  if (by_fours)
    for (int i = gpu::thread() * 4; i < args.width; i += gpu::threads() * 4) sum += of.four(i);
  else
    for (int i = gpu::thread(); i < args.width; i += gpu::threads()) sum += of.one(i);
  if (!args.out) return;
  const float mean = gpu::block_sum(sum, partial) / static_cast<float>(args.width);
  const float factor = 1.0f / gpu::sqrt(mean + args.eps);
  const float* const x = of.x();
  float* const out = args.out + row * args.out_stride;
  if (by_fours) {  // a thread's own again
    for (int i = gpu::thread() * 4; i < args.width; i += gpu::threads() * 4) {
      FourOfRow value = four_of(gpu::load16(x + i));
      const FourOfRow weight = four_of(gpu::load16(args.weight + i));
      for (int j = 0; j < 4; ++j) value.x[j] = value.x[j] * factor * weight.x[j];
      store_four(out + i, value);
    }
  } else {
    for (int i = gpu::thread(); i < args.width; i += gpu::threads()) out[i] = x[i] * factor * args.weight[i];
  }
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
KT_KERNEL(kt_post_rows, PostRowsArgs, args, 512) {
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
  const float* const from = args.x + row * args.x_stride;
  float* const to = args.to_x + int64_t{row} * args.width;
  const bool by_fours = (args.width | args.x_stride) % 4 == 0;
  for (int i = gpu::thread() * 4; live && by_fours && i < args.width; i += gpu::threads() * 4)
    gpu::store16(to + i, gpu::load16(from + i));
  for (int i = gpu::thread(); live && !by_fours && i < args.width; i += gpu::threads()) to[i] = from[i];
  gpu::barrier();
  if (gpu::thread() != 0) return;
  // A fence behind a barrier is one for all that the block wrote.
  uint32_t all = *cold;
  gpu::fence();
  if (gpu::blocks() > 1) {
    gpu::add_to(args.arrived + 1, all);
    gpu::fence();
    if (gpu::add_to(args.arrived, 1) + 1 != static_cast<uint32_t>(gpu::blocks())) return;
    all = gpu::add_to(args.arrived + 1, 0);
    args.arrived[0] = 0;
    args.arrived[1] = 0;
    gpu::fence();
  }
  *args.cold = all;
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

KT_KERNEL(kt_gate, GateArgs, args, 256) {
  const int64_t i = int64_t{gpu::block()} * gpu::threads() + gpu::thread();
  if (i < args.count) args.mid[i] = gated(args.gate[i], args.up[i], {args.kind, args.limit, args.alpha});
}

// Blocks [rows].
KT_KERNEL(kt_round_rows, RoundRowsArgs, args, 256) {
  const int row = gpu::block(), rows = args.order ? args.found->pairs : args.rows;
  if (args.order && row >= rows + kTileRows) return;
  const bool there = row < rows;
  const float* const from = args.from + (there && args.order ? args.order[row] / args.top_k : row) * args.from_stride;
  uint16_t* const to = args.to + int64_t{row} * args.to_width;
  const bool whole = (number_of(args.from) | static_cast<uintptr_t>(args.from_stride * 4)) % 16 == 0;
  const int width = there ? args.width : 0;
  for (int k = gpu::thread() * 4; k < args.to_width; k += gpu::threads() * 4) {
    FourOfRow four;
    if (whole && k + 4 <= width)
      four = four_of(gpu::load16(from + k));
    else
      for (int i = 0; i < 4; ++i) four.x[i] = k + i < width ? from[k + i] : 0.0f;
    gpu::store8(to + k, {{gpu::bf16_pair(four.x[0], four.x[1]), gpu::bf16_pair(four.x[2], four.x[3])}});
  }
}

}  // namespace kt::inline cuda
