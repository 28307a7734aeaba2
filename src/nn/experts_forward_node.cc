#include "nn/experts_forward_node.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"

namespace kt::inline nn {
namespace {

constexpr int kPackRows = ExpertAdapter::kReadRows;  // rows of a pack or requant item
constexpr int kSharedTokens = 32;      // from here on tokens are quantised once and copied to their experts
constexpr int kTileBytes = 256 << 10;  // sums of a prefill item
constexpr size_t kAheadBytes = 16 << 10;      // of weights, fetched while an item waits
constexpr size_t kDownAheadBytes = 96 << 10;  // the same of all experts that a down item of few rows visits
constexpr size_t kRowsAheadBytes = 64 << 10;  // of the next group's rows, fetched during a multiplication

void prefetch(const std::byte* from, size_t bytes, size_t most) {
  for (size_t i = 0; i < std::min(bytes, most); i += 64) __builtin_prefetch(from + i, 0, 2);
}

// Whether the codes, scales and sums of a row are the same in both, whatever their order.
bool same_codes(const ActShape& a, const ActShape& b) {
  return a.code == ActCode::kS8 && b.code == ActCode::kS8 && a.k_pad == b.k_pad &&
         a.scale_span == b.scale_span && a.sum_span == b.sum_span && a.sums == b.sums &&
         a.sum_factor == b.sum_factor && a.far == b.far && a.by_row == b.by_row;
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
      direct_(s.direct),
      keep_(s.keep),
      keeps_only_(s.keeps_only) {}

size_t NodeForward::lay_out() {
  memory_.clear();
  plan_groups();
  list_items();
  for (SharedTokens* tokens : {&gate_tokens_, &up_tokens_})
    tokens->at = memory_.take(tokens->shape.rows ? act_bytes(tokens->shape) : 0);
  partial_at_ = memory_.take(
      direct_ || keeps_only_ ? 0 : static_cast<size_t>(args_.tokens) * shape_.hidden * sizeof(float));
  const size_t rows = most_rows_ + (shard_.paired ? 0 : 1);  // one more to bring gate and up together
  tile_bytes_ = round_up(rows * (widest_ + 1) * kBlockRows * sizeof(float), size_t{64});
  const size_t y_bytes =
      keeps_only_ ? 0 : static_cast<size_t>(args_.tokens) * down_blocks_ * kBlockRows * sizeof(float);
  memory_.take_for_workers(workers_, multiply_bytes_ + tile_bytes_ + y_bytes);
  return memory_.bytes();
}

void NodeForward::plan_groups() {
  const std::vector<ExpertGroup>& groups = routing_.groups;
  parts_.resize(groups.size());
  size_t multiply = args_.adapter ? args_.adapter->scratch_bytes() : 0, down_bytes = 0;
  bool panels = false;
  for (size_t g = 0; g < groups.size(); ++g) {
    const int m = groups[g].m;
    ForwardNode::Part& part = parts_[g];
    if (g > 0 && groups[g - 1].m == m) {
      part = parts_[g - 1];
    } else {
      const auto plan = [&](const StoredBlocks& of) {
        return plan_for(kernels_, of.packing, options_.precision, m);
      };
      part.gate.plan = plan(shard_.gate);
      part.up.plan = shard_.paired ? part.gate.plan : plan(shard_.up);
      part.down.plan = plan(shard_.down);
      part.one_input = shard_.paired || part.gate.plan.acts == part.up.plan.acts;
    }
    part.gate.at = memory_.take(act_bytes(part.gate.plan.acts));
    part.up.at = part.one_input ? part.gate.at : memory_.take(act_bytes(part.up.plan.acts));
    part.kept_tokens_at = memory_.take(kept_bytes(ExpertAdapter::Input::kTokens, m));
    if (!keeps_only_) {
      part.down.at = memory_.take(act_bytes(part.down.plan.acts));
      part.mid_at = memory_.take(static_cast<size_t>(m) * shard_.width() * sizeof(float));
      part.kept_mid_at = memory_.take(kept_bytes(ExpertAdapter::Input::kActivated, m));
    }
    most_rows_ = std::max<size_t>(most_rows_, m);
    for (const Product* product : {&part.gate, &part.up, &part.down})
      multiply = std::max(multiply, product->plan.scratch_bytes);
    down_bytes += shard_.down.stride;
    panels |= part.down.plan.scratch_bytes > 0;
  }
  multiply_bytes_ = round_up(multiply, size_t{64});
  down_blocks_ = blocks_of_item({.all = shard_.down.packing.blocks,
                                 .block_bytes = down_bytes,
                                 .workers = workers_,
                                 .panel_blocks = panels ? kernels_.panel_blocks : 0,
                                 .stream_blocks = kernels_.panel_blocks});
  // In even pieces, of which panels are made; few rows stream one as well as two.
  down_tail_ = down_blocks_ >= 4 ? down_blocks_ / 4 * 2
               : panels          ? down_blocks_
                                 : std::max(1, down_blocks_ / 2);
}

void NodeForward::list_items() {
  const int groups = static_cast<int>(routing_.groups.size());
  const auto rows = [&](Stage stage) {
    for (int g = 0; g < groups; ++g) list_.add_pieces(stage, g, routing_.groups[g].m, kPackRows);
  };
  list_.clear(kStages, groups);
  gate_tokens_.shape = shared_shape(&ForwardNode::Part::gate);
  up_tokens_.shape = shared_shape(&ForwardNode::Part::up);
  if (gate_tokens_.shape.rows || up_tokens_.shape.rows) list_.add_pieces(kTokens, 0, args_.tokens, kPackRows);
  rows(kPack);
  list_reads(kRead, ExpertAdapter::Input::kTokens);
  widest_ = down_blocks_;
  for (int g = 0; g < groups; ++g) list_gate_up(g);
  if (keeps_only_) return;
  rows(kRequant);
  list_reads(kReadMid, ExpertAdapter::Input::kActivated);
  list_down();
}

void NodeForward::list_reads(Stage stage, ExpertAdapter::Input input) {
  if (!reads_apart() || args_.adapter->kept_floats(input) == 0) return;
  for (int g = 0; g < static_cast<int>(routing_.groups.size()); ++g)
    list_.add_pieces(stage, g, routing_.groups[g].m, ExpertAdapter::kReadApart);
}

void NodeForward::list_gate_up(int group) {
  // A worker that meets a group reads its rows from other cores' caches: the more row blocks it then does,
  // the better, while the sums stay in its own.
  const Product &gate = parts_[group].gate, &up = parts_[group].up;
  const bool panels = gate.plan.scratch_bytes > 0 || up.plan.scratch_bytes > 0;
  const int panel_blocks =
      panels ? std::max<int>(kernels_.panel_blocks, kTileBytes / (kBlockRows * 4 * routing_.groups[group].m))
             : 0;
  const Packing &g = shard_.gate.packing, &u = shard_.up.packing;
  const int pairs = std::max(1, blocks_of_item({.all = 2 * std::ssize(routing_.groups) * g.blocks,
                                                .block_bytes = (g.block_bytes + u.block_bytes) / 2,
                                                .workers = workers_,
                                                .panel_blocks = panel_blocks,
                                                .stream_blocks = kernels_.panel_blocks}) /
                                    2);
  widest_ = std::max<size_t>(widest_, 2 * pairs);
  list_.add_pieces(kGateUp, group, static_cast<int>(g.blocks), pairs);
}

void NodeForward::list_down() {
  const int blocks = static_cast<int>(shard_.down.packing.blocks);
  // The last quarter in halves: with two items a worker, the slowest was 10 to 15 % behind the mean.
  for (int b = 0, size = 0; b < blocks; b += size) {
    size = std::min(blocks - b > blocks / 4 ? down_blocks_ : down_tail_, blocks - b);
    list_.add({kDown, 0, b, size});
  }
}

// The codes that the largest group that reads rows for `of` wants, in plain order for all tokens, when enough
// rows want them; else no rows. Groups that want others pack for themselves: with a tile unit, those of few.
ActShape NodeForward::shared_shape(Product ForwardNode::Part::* of) const {
  ActShape s;
  const auto reads = [&](const ForwardNode::Part& part) {
    return of == &ForwardNode::Part::gate || !part.one_input;
  };
  for (const ForwardNode::Part& part : parts_) {
    const ActShape& acts = (part.*of).plan.acts;
    if (reads(part) && acts.code == ActCode::kS8 && acts.rows > s.rows) s = acts;
  }
  size_t rows = 0;
  for (size_t g = 0; g < parts_.size(); ++g)
    if (reads(parts_[g]) && same_codes((parts_[g].*of).plan.acts, s))
      rows += static_cast<size_t>(routing_.groups[g].m);
  s.rows = !args_.input_each && args_.tokens >= kSharedTokens && rows >= 2 * static_cast<size_t>(args_.tokens)
               ? args_.tokens
               : 0;
  s.side = 1;
  s.beside = false;
  return s;
}

void NodeForward::prepare(int memory_node) {
  memory_.allocate(memory_node);
  for (ForwardNode::Part& part : parts_) {
    for (Product* product : {&part.gate, &part.up, &part.down})
      product->acts = acts_in(product->plan.acts, memory_.at(product->at));
    part.mid = reinterpret_cast<float*>(memory_.at(part.mid_at));
    part.kept_tokens = reinterpret_cast<float*>(memory_.at(part.kept_tokens_at));
    part.kept_mid = reinterpret_cast<float*>(memory_.at(part.kept_mid_at));
  }
  for (SharedTokens* tokens : {&gate_tokens_, &up_tokens_})
    if (tokens->shape.rows) tokens->acts = acts_in(tokens->shape, memory_.at(tokens->at));
  partial_ = direct_ || keeps_only_ ? nullptr : reinterpret_cast<float*>(memory_.at(partial_at_));
  list_.start();
}

void NodeForward::run(int rank) noexcept {
  std::byte* mine = memory_.of_worker(rank);
  list_.run([&](const WorkItem& item) {
    switch (static_cast<Stage>(item.stage)) {
      case kTokens:
        return pack_tokens(item);
      case kPack:
        return pack(item, mine);
      case kRead:
        list_.wait(item, kPack, item.group);
        return let_read(item, ExpertAdapter::Input::kTokens, mine);
      case kGateUp:
        return gate_up(item, mine);
      case kRequant:
        return requant(item, mine);
      case kReadMid:
        list_.wait(item, kRequant, item.group);
        return let_read(item, ExpertAdapter::Input::kActivated, mine);
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
  for (const SharedTokens* tokens : {&gate_tokens_, &up_tokens_})
    if (tokens->shape.rows)
      kernels_.pack_acts({.source = from,
                          .type = args_.input_type,
                          .stride = input_stride(),
                          .m = item.count,
                          .k = shape_.hidden,
                          .out = rows_from(tokens->acts, item.begin, item.count)});
}

void NodeForward::pack(const WorkItem& item, std::byte* mine) noexcept {
  const ForwardNode::Part& part = parts_[item.group];
  pack_rows(item, gate_tokens_, part.gate.acts);
  if (!part.one_input) pack_rows(item, up_tokens_, part.up.acts);
  if (args_.adapter && !reads_apart()) let_read(item, ExpertAdapter::Input::kTokens, mine);
}

void NodeForward::pack_rows(const WorkItem& item, const SharedTokens& tokens, const Acts& acts) noexcept {
  const ExpertGroup& group = routing_.groups[item.group];
  const int32_t* index = inputs_of(group) + item.begin;
  const Acts out = rows_of(acts, item, group.m);
  if (tokens.shape.rows && same_codes(tokens.shape, acts.shape)) {
    list_.wait(item, kTokens, 0);
    kernels_.copy_acts({.from = tokens.acts, .index = index, .m = item.count, .out = out});
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
  if (!list_.done(kPack, item.group)) {
    prefetch(shard_.block(group.expert, shard_.gate, item.begin), item.count * shard_.gate.stride,
             kAheadBytes);
    list_.wait(item, kPack, item.group);
  }
  auto* tile = reinterpret_cast<float*>(mine + multiply_bytes_);
  // A block more than needed: rows a multiple of 4 KiB apart would all fall into the same sets of the caches.
  const int64_t ld = (2 * item.count + 1) * kBlockRows;
  multiply_gate_up(item, tile, ld, mine);
  if (args_.adapter) {
    list_.wait(item, kRead, item.group);
    let_add(item, tile, ld, mine);
  }
  if (keep_.rows) keep(item, tile, ld);
  if (keeps_only_) return;
  const int64_t column = int64_t{item.begin} * kBlockRows;
  const auto bias = [&](const std::vector<float>& all) {
    return all.empty() ? nullptr : all.data() + group.expert * shard_.width() + column;
  };
  const ActivateArgs activate{.gate_up = tile,
                              .ld = ld,
                              .m = group.m,
                              .pairs = item.count,
                              .gate_bias = bias(shard_.gate_bias),
                              .up_bias = bias(shard_.up_bias),
                              .activation = options_.activation,
                              .mid = parts_[item.group].mid + column,
                              .mid_ld = shard_.width()};
  if (shard_.paired)
    kernels_.activate(activate);
  else
    activate_apart(activate, tile + group.m * ld);
}

// Into tile [m, ld]: gate and up in turns, blocks of 16 columns each; or all of gate, then all of up.
void NodeForward::multiply_gate_up(const WorkItem& item, float* tile, int64_t ld,
                                   std::byte* scratch) noexcept {
  const ExpertGroup& group = routing_.groups[item.group];
  const ForwardNode::Part& part = parts_[item.group];
  const std::byte* up = shard_.block(group.expert, shard_.up, item.begin);
  MultiplyArgs args{.packing = &shard_.gate.packing,
                    .blocks = shard_.block(group.expert, shard_.gate, item.begin),
                    .count = shard_.paired ? 2 * item.count : item.count,
                    .after = shard_.paired ? nullptr : up,
                    .acts = part.gate.acts,
                    .m = group.m,
                    .out = tile,
                    .ld = ld,
                    .scratch = scratch};
  part.gate.plan.multiply(args);
  if (shard_.paired) return;
  args.packing = &shard_.up.packing;
  args.blocks = up;
  args.after = nullptr;
  args.acts = part.up.acts;
  args.out = tile + item.count * kBlockRows;
  part.up.plan.multiply(args);
}

// Of a tile whose columns are all of gate, then all of up: brought together a row at a time, in `row`, which
// stays in the first cache.
void NodeForward::activate_apart(ActivateArgs args, float* row) noexcept {
  const float* tile = args.gate_up;
  const int rows = args.m;
  args.gate_up = row;
  args.m = 1;
  for (int i = 0; i < rows; ++i, tile += args.ld, args.mid += args.mid_ld) {
    for (int p = 0; p < args.pairs; ++p) {
      std::copy_n(tile + p * kBlockRows, kBlockRows, row + 2 * p * kBlockRows);
      std::copy_n(tile + (args.pairs + p) * kBlockRows, kBlockRows, row + (2 * p + 1) * kBlockRows);
    }
    kernels_.activate(args);
  }
}

void NodeForward::keep(const WorkItem& item, const float* tile, int64_t ld) noexcept {
  const ExpertGroup& group = routing_.groups[item.group];
  const auto size = static_cast<int64_t>(bytes_of(keep_.type));
  const int columns = item.count * kBlockRows;
  for (int i = 0; i < group.m; ++i, tile += ld) {
    std::byte* const to =
        keep_.rows + ((group.first + i) * shard_.both() + item.begin * shard_.block_step()) * size;
    if (shard_.paired) {
      kernels_.store(to, keep_.type, tile, 2 * columns);
    } else {
      kernels_.store(to, keep_.type, tile, columns);
      kernels_.store(to + shard_.up_at() * size, keep_.type, tile + columns, columns);
    }
  }
}

void NodeForward::requant(const WorkItem& item, std::byte* mine) noexcept {
  const ForwardNode::Part& part = parts_[item.group];
  list_.wait(item, kGateUp, item.group);
  kernels_.pack_acts({.source = part.mid + item.begin * shard_.width(),
                      .type = Real::kF32,
                      .stride = shard_.width(),
                      .m = item.count,
                      .k = shard_.end - shard_.begin,
                      .out = rows_of(part.down.acts, item, routing_.groups[item.group].m)});
  if (args_.adapter && !reads_apart()) let_read(item, ExpertAdapter::Input::kActivated, mine);
}

// While group g's rows are waited for: its weights, and with few rows those of the groups behind it.
void NodeForward::fetch_down(const WorkItem& item, int g) const noexcept {
  const size_t bytes = static_cast<size_t>(item.count) * shard_.down.stride;
  const bool few = parts_[g].down.plan.scratch_bytes == 0;
  const int groups = static_cast<int>(routing_.groups.size());
  size_t left = few ? kDownAheadBytes : kAheadBytes;
  for (int next = g; next < groups && left > 0 && !list_.done(kRequant, g); ++next) {
    prefetch(shard_.block(routing_.groups[next].expert, shard_.down, item.begin), bytes, left);
    left -= std::min(left, bytes);
    if (!few) return;
  }
}

void NodeForward::down(const WorkItem& item, std::byte* mine) noexcept {
  const int columns = item.count * kBlockRows, groups = static_cast<int>(routing_.groups.size());
  auto* tile = reinterpret_cast<float*>(mine + multiply_bytes_);
  auto* y = reinterpret_cast<float*>(mine + multiply_bytes_ + tile_bytes_);  // [tokens, columns]
  std::memset(y, 0, static_cast<size_t>(args_.tokens) * columns * sizeof(float));
  for (int g = 0; g < groups; ++g) {
    const ExpertGroup& group = routing_.groups[g];
    const ForwardNode::Part& part = parts_[g];
    const std::byte* blocks = shard_.block(group.expert, shard_.down, item.begin);
    if (!list_.done(kRequant, g)) {
      fetch_down(item, g);
      list_.wait(item, kRequant, g);
    }
    const std::byte* after = nullptr;
    if (g + 1 < groups) {
      after = shard_.block(routing_.groups[g + 1].expert, shard_.down, item.begin);
      // the next group's rows come from other cores' caches: have them on their way while this one is
      // multiplied
      const Acts& next = parts_[g + 1].down.acts;
      if (part.down.plan.scratch_bytes > 0 && list_.done(kRequant, g + 1))
        prefetch(next.codes, act_bytes(next.shape), kRowsAheadBytes);
    }
    part.down.plan.multiply({.packing = &shard_.down.packing,
                             .blocks = blocks,
                             .count = item.count,
                             .after = after,
                             .acts = part.down.acts,
                             .m = group.m,
                             .out = tile,
                             .ld = columns,
                             .scratch = mine});
    if (args_.adapter) {
      list_.wait(item, kReadMid, g);
      let_add_down(item, g, tile, mine);
    }
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

size_t NodeForward::kept_bytes(ExpertAdapter::Input input, int m) const {
  if (!args_.adapter) return 0;
  return static_cast<size_t>(round_up(m, ExpertAdapter::kReadRows)) *
         static_cast<size_t>(args_.adapter->kept_floats(input)) * sizeof(float);
}

void NodeForward::let_read(const WorkItem& item, ExpertAdapter::Input input, std::byte* scratch) noexcept {
  if (args_.adapter->kept_floats(input) == 0) return;
  const ExpertGroup& group = routing_.groups[item.group];
  const ForwardNode::Part& part = parts_[item.group];
  ExpertAdapter::Rows rows{.input = input,
                           .expert = group.expert,
                           .count = item.count,
                           .first = item.begin,
                           .m = group.m,
                           .columns = shape_.hidden,
                           .tokens = inputs_of(group) + item.begin,
                           .source = args_.input,
                           .type = args_.input_type,
                           .stride = input_stride(),
                           .kept = part.kept_tokens,
                           .scratch = scratch};
  if (input == ExpertAdapter::Input::kActivated) {
    rows.column = shard_.begin;
    rows.columns = shard_.end - shard_.begin;
    rows.source = part.mid + item.begin * shard_.width();
    rows.type = Real::kF32;
    rows.stride = shard_.width();
    rows.kept = part.kept_mid;
  }
  const ForwardNode::Part& of = parts_[item.group];
  const Product& product = input == ExpertAdapter::Input::kTokens ? of.gate : of.down;
  const Acts packed = rows_of(product.acts, item, group.m);
  if (product.plan.route == Route::kManyBf16) rows.packed = &packed;
  args_.adapter->read(rows);
}

void NodeForward::let_add(const WorkItem& item, float* tile, int64_t ld, std::byte* scratch) noexcept {
  const ExpertGroup& group = routing_.groups[item.group];
  const int first = shard_.begin + item.begin * kBlockRows;
  ExpertAdapter::Tile to{.part = ExpertPart::kGate,
                         .expert = group.expert,
                         .m = group.m,
                         .column = first,
                         .columns = std::min(item.count * kBlockRows, shard_.end - first),
                         .tokens = inputs_of(group),
                         .kept = parts_[item.group].kept_tokens,
                         .sums = tile,
                         .ld = ld,
                         .block_ld = shard_.paired ? 2 * kBlockRows : kBlockRows,
                         .scratch = scratch};
  args_.adapter->add(to);
  to.part = ExpertPart::kUp;
  to.sums += shard_.paired ? kBlockRows : item.count * kBlockRows;
  args_.adapter->add(to);
}

void NodeForward::let_add_down(const WorkItem& item, int g, float* tile, std::byte* scratch) noexcept {
  const ExpertGroup& group = routing_.groups[g];
  const int columns = item.count * kBlockRows, first = item.begin * kBlockRows;
  args_.adapter->add({.part = ExpertPart::kDown,
                      .expert = group.expert,
                      .m = group.m,
                      .column = first,
                      .columns = std::min(columns, shape_.hidden - first),
                      .tokens = inputs_of(group),
                      .kept = parts_[g].kept_mid,
                      .sums = tile,
                      .ld = columns,
                      .block_ld = kBlockRows,
                      .scratch = scratch});
}

}  // namespace kt::inline nn
