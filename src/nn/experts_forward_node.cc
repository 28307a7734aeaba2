#include "nn/experts_forward_node.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"

namespace kt {
namespace {

constexpr int kPackRows = 32;          // rows of a pack or requant item
constexpr int kSharedTokens = 32;      // from here on tokens are quantised once and copied to their experts
constexpr int kTileBytes = 256 << 10;  // sums of a prefill item
constexpr size_t kAheadBytes = 16 << 10;      // of weights, fetched while an item waits
constexpr size_t kRowsAheadBytes = 64 << 10;  // of the next group's rows, fetched during a multiplication

void prefetch(const std::byte* from, size_t bytes, size_t most) {
  for (size_t i = 0; i < std::min(bytes, most); i += 64) __builtin_prefetch(from + i, 0, 2);
}

Acts rows_from(const Acts& acts, int row, int rows) {
  Acts a = acts;
  const size_t size = acts.shape.code == ActCode::kS8 ? 1 : acts.shape.code == ActCode::kBf16 ? 2 : 4;
  a.shape.rows = rows;
  a.codes += static_cast<size_t>(row) * acts.shape.k_pad * size;
  if (acts.scales) a.scales += static_cast<size_t>(row) * acts.shape.scale_spans();
  if (acts.sums) a.sums += static_cast<size_t>(row) * acts.shape.sum_spans();
  return a;
}

// Packed rows of an item: the last one of a group brings the padding rows along.
Acts rows_of(const Acts& acts, const WorkItem& item, int m) {
  return rows_from(acts, item.begin,
                   item.begin + item.count == m ? acts.shape.rows - item.begin : item.count);
}

}  // namespace

NodeForward::NodeForward(const Setting& s)
    : kernels_(*s.kernels),
      shape_(*s.shape),
      options_(*s.options),
      shard_(*s.shard),
      args_(*s.args),
      routing_(*s.routing),
      list_(s.node->list),
      memory_(s.node->memory),
      parts_(s.node->parts),
      down_bias_(s.down_bias),
      workers_(s.workers),
      direct_(s.direct) {}

size_t NodeForward::lay_out() {
  memory_.clear();
  plan_groups();
  list_items();
  const ActShape shared = shared_shape();
  tokens_at_ = memory_.take(shared.rows ? act_bytes(shared) : 0);
  partial_at_ = memory_.take(direct_ ? 0 : static_cast<size_t>(args_.tokens) * shape_.hidden * sizeof(float));
  tile_bytes_ = round_up(most_rows_ * (widest_ + 1) * kBlockRows * sizeof(float), size_t{64});
  const size_t y_bytes = static_cast<size_t>(args_.tokens) * down_blocks_ * kBlockRows * sizeof(float);
  memory_.take_for_workers(workers_, multiply_bytes_ + tile_bytes_ + y_bytes);
  return memory_.bytes();
}

void NodeForward::plan_groups() {
  const std::vector<ExpertGroup>& groups = routing_.groups;
  parts_.resize(groups.size());
  size_t multiply = 0, down_bytes = 0;
  bool panels = false;
  for (size_t g = 0; g < groups.size(); ++g) {
    const int m = groups[g].m;
    ForwardNode::Part& part = parts_[g];
    const bool same = g > 0 && groups[g - 1].m == m;
    part.in = same ? parts_[g - 1].in : plan_for(kernels_, shard_.gate_up, options_.precision, m);
    part.down = same ? parts_[g - 1].down : plan_for(kernels_, shard_.down, options_.precision, m);
    part.in_at = memory_.take(act_bytes(part.in.acts));
    part.mid_acts_at = memory_.take(act_bytes(part.down.acts));
    part.mid_at = memory_.take(static_cast<size_t>(m) * mid_ld() * sizeof(float));
    most_rows_ = std::max<size_t>(most_rows_, m);
    multiply = std::max({multiply, part.in.scratch_bytes, part.down.scratch_bytes});
    down_bytes += shard_.down.block_bytes;
    panels |= part.down.scratch_bytes > 0;
  }
  multiply_bytes_ = round_up(multiply, size_t{64});
  down_blocks_ = blocks_of_item({.all = shard_.down.blocks,
                                 .block_bytes = down_bytes,
                                 .workers = workers_,
                                 .panel_blocks = panels ? kernels_.panel_blocks : 0,
                                 .stream_blocks = kernels_.panel_blocks});
}

void NodeForward::list_items() {
  const int groups = static_cast<int>(routing_.groups.size());
  const auto rows = [&](Stage stage) {
    for (int g = 0; g < groups; ++g) list_.add_pieces(stage, g, routing_.groups[g].m, kPackRows);
  };
  list_.clear(kStages, groups);
  if (shared_shape().rows) list_.add_pieces(kTokens, 0, args_.tokens, kPackRows);
  rows(kPack);
  widest_ = down_blocks_;
  for (int g = 0; g < groups; ++g) list_gate_up(g);
  rows(kRequant);
  list_down();
}

void NodeForward::list_gate_up(int group) {
  // A worker that meets a group reads its rows from other cores' caches: the more row blocks it then does,
  // the better, while the sums stay in its own.
  const bool panels = parts_[group].in.scratch_bytes > 0;
  const int panel_blocks =
      panels ? std::max<int>(kernels_.panel_blocks, kTileBytes / (kBlockRows * 4 * routing_.groups[group].m))
             : 0;
  const int pairs =
      std::max(1, blocks_of_item({.all = 2 * std::ssize(routing_.groups) * shard_.gate_up.blocks,
                                  .block_bytes = shard_.gate_up.block_bytes,
                                  .workers = workers_,
                                  .panel_blocks = panel_blocks,
                                  .stream_blocks = kernels_.panel_blocks}) /
                      2);
  widest_ = std::max<size_t>(widest_, 2 * pairs);
  list_.add_pieces(kGateUp, group, static_cast<int>(shard_.gate_up.blocks), pairs);
}

void NodeForward::list_down() {
  const int blocks = static_cast<int>(shard_.down.blocks);
  // The last quarter in halves: with two items a worker, the slowest was 10 to 15 % behind the mean.
  const int tail = down_blocks_ >= 4 ? down_blocks_ / 4 * 2 : down_blocks_;
  for (int b = 0, size = 0; b < blocks; b += size) {
    size = std::min(blocks - b > blocks / 4 ? down_blocks_ : tail, blocks - b);
    list_.add({kDown, 0, b, size});
  }
}

// Plain order for all tokens when every group wants the same codes and there are enough of them; else no
// rows.
ActShape NodeForward::shared_shape() const {
  ActShape s = parts_[0].in.acts;
  bool same = s.code == ActCode::kS8 && args_.tokens >= kSharedTokens &&
              routing_.token.size() >= 2 * static_cast<size_t>(args_.tokens);
  for (const ForwardNode::Part& part : parts_)
    same = same && part.in.acts.scale_span == s.scale_span && part.in.acts.sum_span == s.sum_span;
  s.rows = same ? args_.tokens : 0;
  s.side = 1;
  return s;
}

void NodeForward::prepare(int memory_node) {
  memory_.allocate(memory_node);
  for (ForwardNode::Part& part : parts_) {
    part.in_acts = acts_in(part.in.acts, memory_.at(part.in_at));
    part.mid_acts = acts_in(part.down.acts, memory_.at(part.mid_acts_at));
    part.mid = reinterpret_cast<float*>(memory_.at(part.mid_at));
  }
  const ActShape shared = shared_shape();
  tokens_ = shared.rows ? acts_in(shared, memory_.at(tokens_at_)) : Acts{};
  partial_ = direct_ ? nullptr : reinterpret_cast<float*>(memory_.at(partial_at_));
  list_.start();
}

void NodeForward::run(int rank) noexcept {
  std::byte* mine = memory_.of_worker(rank);
  list_.run([&](const WorkItem& item) {
    switch (static_cast<Stage>(item.stage)) {
      case kTokens:
        return pack_tokens(item);
      case kPack:
        return pack(item);
      case kGateUp:
        return gate_up(item, mine);
      case kRequant:
        return requant(item);
      case kDown:
        return down(item, mine);
      case kStages:
        break;
    }
  });
}

void NodeForward::pack_tokens(const WorkItem& item) noexcept {
  const auto* from = static_cast<const std::byte*>(args_.input) +
                     item.begin * input_stride() * static_cast<int64_t>(bytes_of(args_.input_type));
  kernels_.pack_acts({.source = from,
                      .type = args_.input_type,
                      .stride = input_stride(),
                      .m = item.count,
                      .k = shape_.hidden,
                      .out = rows_from(tokens_, item.begin, item.count)});
}

void NodeForward::pack(const WorkItem& item) noexcept {
  const ExpertGroup& group = routing_.groups[item.group];
  const int32_t* index = routing_.tokens_of(group) + item.begin;
  const Acts out = rows_of(parts_[item.group].in_acts, item, group.m);
  if (tokens_.codes) {
    list_.wait(item, kTokens, 0);
    kernels_.copy_acts({.from = tokens_, .index = index, .m = item.count, .out = out});
  } else {
    kernels_.pack_acts({.source = args_.input,
                        .type = args_.input_type,
                        .stride = input_stride(),
                        .index = index,
                        .m = item.count,
                        .k = shape_.hidden,
                        .out = out});
  }
}

void NodeForward::gate_up(const WorkItem& item, std::byte* mine) noexcept {
  const ExpertGroup& group = routing_.groups[item.group];
  const ForwardNode::Part& part = parts_[item.group];
  const std::byte* blocks = shard_.expert(group.expert) + item.begin * shard_.pair_bytes;
  if (!list_.done(kPack, item.group)) {
    prefetch(blocks, item.count * shard_.pair_bytes, kAheadBytes);
    list_.wait(item, kPack, item.group);
  }
  auto* tile = reinterpret_cast<float*>(mine + multiply_bytes_);
  // A block more than needed: rows a multiple of 4 KiB apart would all fall into the same sets of the caches.
  const int64_t ld = (2 * item.count + 1) * kBlockRows;
  part.in.multiply({.packing = &shard_.gate_up,
                    .blocks = blocks,
                    .count = 2 * item.count,
                    .acts = part.in_acts,
                    .m = group.m,
                    .out = tile,
                    .ld = ld,
                    .scratch = mine});
  const int64_t column = int64_t{item.begin} * kBlockRows;
  const auto bias = [&](const std::vector<float>& all) {
    return all.empty() ? nullptr : all.data() + group.expert * mid_ld() + column;
  };
  kernels_.activate({.gate_up = tile,
                     .ld = ld,
                     .m = group.m,
                     .pairs = item.count,
                     .gate_bias = bias(shard_.gate_bias),
                     .up_bias = bias(shard_.up_bias),
                     .activation = options_.activation,
                     .mid = part.mid + column,
                     .mid_ld = mid_ld()});
}

void NodeForward::requant(const WorkItem& item) noexcept {
  const ForwardNode::Part& part = parts_[item.group];
  list_.wait(item, kGateUp, item.group);
  kernels_.pack_acts({.source = part.mid + item.begin * mid_ld(),
                      .type = Real::kF32,
                      .stride = mid_ld(),
                      .m = item.count,
                      .k = shard_.end - shard_.begin,
                      .out = rows_of(part.mid_acts, item, routing_.groups[item.group].m)});
}

void NodeForward::down(const WorkItem& item, std::byte* mine) noexcept {
  const int columns = item.count * kBlockRows, groups = static_cast<int>(routing_.groups.size());
  auto* tile = reinterpret_cast<float*>(mine + multiply_bytes_);
  auto* y = reinterpret_cast<float*>(mine + multiply_bytes_ + tile_bytes_);  // [tokens, columns]
  std::memset(y, 0, static_cast<size_t>(args_.tokens) * columns * sizeof(float));
  for (int g = 0; g < groups; ++g) {
    const ExpertGroup& group = routing_.groups[g];
    const ForwardNode::Part& part = parts_[g];
    const std::byte* blocks = down_blocks(group.expert, item.begin);
    if (!list_.done(kRequant, g)) {
      prefetch(blocks, item.count * shard_.down.block_bytes, kAheadBytes);
      list_.wait(item, kRequant, g);
    }
    const std::byte* after = nullptr;
    if (g + 1 < groups) {
      after = down_blocks(routing_.groups[g + 1].expert, item.begin);
      // the next group's rows come from other cores' caches: have them on their way while this one is
      // multiplied
      const Acts& next = parts_[g + 1].mid_acts;
      if (part.down.scratch_bytes > 0 && list_.done(kRequant, g + 1))
        prefetch(next.codes, act_bytes(next.shape), kRowsAheadBytes);
    }
    part.down.multiply({.packing = &shard_.down,
                        .blocks = blocks,
                        .count = item.count,
                        .after = after,
                        .acts = part.mid_acts,
                        .m = group.m,
                        .out = tile,
                        .ld = columns,
                        .scratch = mine});
    add_group(item, g, tile, y);
  }
  store(item, y);
}

void NodeForward::add_group(const WorkItem& item, int g, const float* tile, float* y) noexcept {
  const ExpertGroup& group = routing_.groups[g];
  const int columns = item.count * kBlockRows, first = item.begin * kBlockRows;
  const int real = std::min(columns, shape_.hidden - first);
  const float* bias = down_bias_ && !down_bias_->empty()
                          ? down_bias_->data() + int64_t{group.expert} * shape_.hidden + first
                          : nullptr;
  for (int i = 0; i < group.m; ++i) {
    float* to = y + int64_t{routing_.token[group.first + i]} * columns;
    const float weight = routing_.weight[group.first + i];
    kernels_.add_scaled(to, tile + int64_t{i} * columns, weight, columns);
    if (bias) kernels_.add_scaled(to, bias, weight, real);
  }
}

void NodeForward::store(const WorkItem& item, const float* y) noexcept {
  const int columns = item.count * kBlockRows, first = item.begin * kBlockRows;
  const int real = std::min(columns, shape_.hidden - first);
  const int64_t stride = args_.output_stride ? args_.output_stride : shape_.hidden;
  auto* const out = static_cast<std::byte*>(args_.output);
  for (int t = 0; t < args_.tokens; ++t) {
    const float* from = y + int64_t{t} * columns;
    if (direct_)
      kernels_.store(out + (t * stride + first) * static_cast<int64_t>(bytes_of(args_.output_type)),
                     args_.output_type, from, real);
    else
      std::memcpy(partial_ + int64_t{t} * shape_.hidden + first, from, real * sizeof(float));
  }
}

}  // namespace kt
