#include "nn/experts_backward_node.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "kernels/row_ops.h"
#include "nn/float_rows.h"
#include "nn/lora_adapter.h"

namespace kt::inline nn {
namespace {

constexpr int kPackRows = 32;  // rows of a pack item
constexpr int kReadRows = ExpertAdapter::kReadApart;
constexpr int kPiece = 256;        // columns of them that are read as f32 at once
constexpr int kRows = kManyRows;   // rows of a product, whose sums stay in a core's cache
constexpr int kSpan = 4 * kChunk;  // columns of `inter` of a middle item
constexpr int kPanelBlocks = kChunk / kBlockRows;
constexpr int kWideInput = 2 * kChunk;  // columns of an input item whose products are in bf16
constexpr int kFewRows = 128;           // a group's, for which a panel is read once: it had better stay in L2
constexpr size_t kPanelInL2 = size_t{768} << 10;
constexpr Format kBf16Panel{Code::kBf16, 0, Scale::kNone, Min::kNone, {}};
constexpr Format kF32Panel{Code::kF32, 0, Scale::kNone, Min::kNone, {}};

int width_of(const LowRank& f) { return f.empty() ? 0 : round_up(f.rank, kBlockRows); }

// Packed rows [first, first + count) of a group's m: the last ones bring the padding rows along.
Acts rows_of(const Acts& acts, int first, int count, int m) {
  return rows_from(acts, first, first + count == m ? acts.shape.rows - first : count);
}

// The same rows from column `first` on, a multiple of kChunk. Not for s8.
Acts columns_of(Acts acts, int first) {
  const ActShape& s = acts.shape;
  acts.codes += int64_t{first} * (s.code == ActCode::kF32 ? 4 : 2 * s.side);
  return acts;
}

}  // namespace

NodeBackward::NodeBackward(const Setting& s)
    : state_(*s.experts),
      kernels_(*s.experts->kernels),
      back_(back_kernels(*s.experts->kernels)),
      shape_(s.experts->shape),
      shard_(*s.shard),
      args_(*s.args),
      adapter_(*s.adapter),
      routing_(*s.routing),
      kept_(s.kept),
      kept_type_(s.kept_type),
      list_(s.node->list),
      memory_(s.node->memory),
      parts_(s.node->parts),
      workers_(s.workers),
      first_(s.first),
      direct_(s.direct),
      bf16_(*s.experts->kernels, s.kept_type == Real::kBf16),
      f32_(*s.experts->kernels, false),
      factors_bf16_(bf16_.bf16() && s.args->lora.wide()) {}

int NodeBackward::spans() const { return ceil_div(shard_.end - shard_.begin, kSpan); }

NodeBackward::Columns NodeBackward::columns_at(int column) const {
  const int most = std::min(kChunk, shard_.end - shard_.begin - column);
  const PaddedParts::Stretch here = state_.padding.stretch(shard_.begin + column, most);
  return {column, here.first, here.count};
}

size_t NodeBackward::lay_out() {
  memory_.clear();
  plan_groups();
  list_items();
  const size_t rows = routing_.token.size(), floats = sizeof(float);
  const auto take = [&](Factors& f, const LowRank& of) {
    f.rank = of.empty() ? 0 : of.rank;
    f.width = width_of(of);
    f.read_at = memory_.take(rows * f.width * floats);
    f.sums_at = memory_.take(rows * f.width * spans() * floats);
  };
  take(gate_up_, args_.lora.gate_up);
  take(down_, args_.lora.down);
  down_.weighted_at = memory_.take(rows * down_.width * floats);
  weights_at_ = memory_.take(rows * (1 + spans()) * floats);
  input_at_ = memory_.take(
      direct_ || !args_.input_grad ? 0 : static_cast<size_t>(args_.call.tokens) * shape_.hidden * floats);
  lay_out_worker();
  return memory_.bytes();
}

void NodeBackward::plan_groups() {
  const bool bf16 = bf16_.bf16();
  const Format& format = bf16 ? kBf16Panel : kF32Panel;
  const Route route = bf16 ? Route::kManyBf16 : Route::kManyF32;
  transpose_ = bf16 ? back_.transpose_bf16 : back_.transpose_f32;
  const auto rank = [&](const LowRank& f) {
    return f.empty() || !factors_bf16_ ? 0 : round_up(f.rank, kChunk);
  };
  down_k_ = round_up(shape_.hidden, kChunk);
  both_k_ = static_cast<int>(round_up(shard_.both(), int64_t{kChunk}));
  plain_down_ = packing_for(format, kChunk, down_k_ + rank(args_.lora.down), kernels_.fragment, "down");
  plain_gate_up_ =
      packing_for(format, kChunk, both_k_ + rank(args_.lora.gate_up), kernels_.fragment, "gate and up");
  parts_.resize(routing_.groups.size());
  for (size_t g = 0; g < parts_.size(); ++g) {
    const auto plan = [&](Product& product, const Packing& panel) {
      product.plan = plan_route(kernels_, panel, route, routing_.groups[g].m);
      product.at = memory_.take(act_bytes(product.plan.acts));
      multiply_bytes_ = std::max(multiply_bytes_, product.plan.scratch_bytes);
    };
    plan(parts_[g].down, plain_down_);
    if (args_.input_grad) plan(parts_[g].gate_up, plain_gate_up_);
  }
}

void NodeBackward::list_items() {
  const int groups = static_cast<int>(routing_.groups.size());
  list_.clear(kStages, groups);
  for (int g = 0; g < groups; ++g) list_.add_pieces(kPack, g, routing_.groups[g].m, kPackRows);
  for (int g = 0; g < groups; ++g) list_.add_pieces(kRead, g, routing_.groups[g].m, kReadRows);
  for (int g = 0; g < groups; ++g) list_.add_pieces(kMiddle, g, shard_.end - shard_.begin, kSpan);
  for (int g = 0; g < groups; ++g) list_.add({kSums, g, 0, 1});
  if (direct_ && !args_.lora.empty())
    for (int g = 0; g < groups; ++g) list_.add({kFactors, g, 0, 1});
  if (args_.input_grad) list_input();
}

// Wide items as long as every worker gets one; the rest in pieces that divide better.
void NodeBackward::list_input() {
  widest_ = kChunk;
  int column = 0;
  if (bf16_.bf16())
    for (const int round = kWideInput * workers_; column + round <= shape_.hidden;)
      for (const int end = column + round; column < end; column += kWideInput) {
        list_.add({kInput, 0, column, kWideInput});
        widest_ = kWideInput;
      }
  for (; column < shape_.hidden; column += kChunk)
    list_.add({kInput, 0, column, std::min(kChunk, shape_.hidden - column)});
}

// Columns of `inter` whose panel is made and multiplied at once: with many rows these come from other cores' caches,
// and the more columns they meet the better.
int NodeBackward::wide_columns(int m) const {
  if (!bf16_.bf16()) return kChunk;
  if (m > kFewRows) return kSpan;
  const size_t column_bytes = plain_down_.block_bytes / kBlockRows;
  return static_cast<int>(std::clamp<size_t>(kPanelInL2 / column_bytes / kChunk, 1, kSpan / kChunk)) * kChunk;
}

void NodeBackward::lay_out_worker() {
  const int most_rows = std::min(kRows, std::ranges::max(routing_.groups, {}, &ExpertGroup::m).m);
  const size_t rows = round_up(static_cast<size_t>(most_rows), size_t{kPackRows}), floats = sizeof(float);
  const size_t wide = std::max({kChunk, widest_, gate_up_.width, down_.width});
  const bool bf16 = bf16_.bf16();
  const auto turned = [&](int k, int width) {
    return static_cast<size_t>(width / kBlockRows * std::max(bf16_.block_bytes(k), f32_.block_bytes(k)));
  };
  if (factors_bf16_)
    multiply_bytes_ =
        std::max({multiply_bytes_, bf16_.product_bytes(most_rows, 2 * kChunk),
                  bf16_.sum_bytes(std::max(gate_up_.rank, down_.rank)), adapter_.scratch_bytes()});
  size_t at = 0;
  const auto place = [&](size_t bytes) {
    const size_t here = at;
    at += round_up(bytes, size_t{64});
    return here;
  };
  places_.multiply = place(multiply_bytes_);
  const size_t down_panel = plain_down_.block_bytes * (bf16 ? kSpan : kChunk) / kBlockRows;
  places_.panel = place(std::max(down_panel, plain_gate_up_.block_bytes * widest_ / kBlockRows));
  places_.tile = place(std::max(rows * std::max(kSpan, widest_), size_t{kPackRows} * kPiece) * floats);
  places_.mid = place(rows * kSpan * floats);
  places_.both = place(2 * rows * kChunk * floats);
  places_.more = place(std::max(rows * wide, size_t{2} * kChunk * gate_up_.rank) * floats);
  places_.turned =
      place(std::max({turned(bf16 ? std::max(plain_down_.k_pad, kPiece) : kPiece, down_.width),
                      turned(kChunk, down_.width) + turned(2 * kChunk, gate_up_.width),
                      turned(std::max({down_.rank, gate_up_.rank, 1}), std::max(kChunk, widest_))}));
  places_.y = place(args_.input_grad ? size_t(args_.call.tokens) * widest_ * floats : 0);
  memory_.take_for_workers(workers_, at);
}

void NodeBackward::prepare(int memory_node) {
  memory_.allocate(memory_node);
  const auto floats = [&](size_t at) { return reinterpret_cast<float*>(memory_.at(at)); };
  for (BackwardNode::Part& part : parts_)
    for (Product* product : {&part.down, &part.gate_up})
      product->acts = acts_in(product->plan.acts, memory_.at(product->at));
  for (Factors* f : {&gate_up_, &down_}) {
    f->read = floats(f->read_at);
    f->sums = floats(f->sums_at);
  }
  down_.weighted = floats(down_.weighted_at);
  weights_ = floats(weights_at_);
  input_ = direct_ || !args_.input_grad ? nullptr : floats(input_at_);
  list_.start();
}

void NodeBackward::run(int rank) noexcept {
  std::byte* mine = memory_.of_worker(rank);
  list_.run([&](const WorkItem& item) {
    switch (static_cast<Stage>(item.stage)) {
      case kPack:
        return pack(item);
      case kRead:
        list_.wait(item, kPack, item.group);
        return read(item, mine);
      case kMiddle:
        return middle(item, mine);
      case kSums:
        return sum_spans(item);
      case kFactors:
        list_.wait(item, kSums, item.group);
        return add_factors(item.group, mine);
      case kInput:
        return input(item, mine);
      case kStages:
        break;
    }
  });
}

void NodeBackward::pack(const WorkItem& item) noexcept {
  const ExpertGroup& group = routing_.groups[item.group];
  const int32_t* tokens = routing_.tokens_of(group) + item.begin;
  const Product& down = parts_[item.group].down;
  kernels_.pack_acts({.source = args_.output_grad,
                      .type = args_.output_grad_type,
                      .stride = args_.output_grad_stride ? args_.output_grad_stride : shape_.hidden,
                      .index = tokens,
                      .m = item.count,
                      .k = shape_.hidden,
                      .out = rows_of(down.acts, item.begin, item.count, group.m)});
}

void NodeBackward::read(const WorkItem& item, std::byte* mine) noexcept {
  const ExpertGroup& group = routing_.groups[item.group];
  read_output_grad(item, mine);
  if (!gate_up_.rank) return;
  const ForwardArgs& call = args_.call;
  adapter_.read_floats({.input = ExpertAdapter::Input::kTokens,
                        .expert = group.expert,
                        .count = item.count,
                        .first = item.begin,
                        .m = group.m,
                        .columns = shape_.hidden,
                        .tokens = routing_.tokens_of(group) + item.begin,
                        .source = call.input,
                        .type = call.input_type,
                        .stride = call.input_stride ? call.input_stride : shape_.hidden,
                        .kept = gate_up_.read + int64_t{group.first} * gate_up_.rank,
                        .scratch = mine + places_.multiply});
}

// What B of down and down's bias make of rows of the output's gradient.
void NodeBackward::read_output_grad(const WorkItem& item, std::byte* mine) noexcept {
  const ExpertGroup& group = routing_.groups[item.group];
  const LowRank& f = args_.lora.down;
  const int64_t row = group.first + item.begin;
  const float* bias = first_ && args_.weights_grad && !state_.down_bias.empty()
                          ? state_.down_bias.data() + int64_t{group.expert} * shape_.hidden
                          : nullptr;
  float *const of_bias = weights_ + row, *const read = down_.read + row * down_.width;
  std::fill_n(of_bias, item.count, 0.0f);
  std::fill_n(read, int64_t{item.count} * down_.width, 0.0f);
  if (!bias && !down_.rank) return;
  auto* const rows = reinterpret_cast<float*>(mine + places_.tile);
  auto* const more = reinterpret_cast<float*>(mine + places_.more);
  const FloatRows source{.source = args_.output_grad,
                         .type = args_.output_grad_type,
                         .stride = args_.output_grad_stride ? args_.output_grad_stride : shape_.hidden,
                         .index = routing_.tokens_of(group) + item.begin};
  const FactorProducts& of = products(group.m);
  const auto turn = [&](int column, int columns, int k_pad) {
    of.turn({.from = f.b + (int64_t{group.expert} * shape_.hidden + column) * f.rank,
             .k_step = f.rank,
             .lane_step = 1,
             .k = columns,
             .lanes = f.rank,
             .blocks = down_.width / kBlockRows,
             .k_pad = k_pad,
             .out = mine + places_.turned,
             .out_stride = of.block_bytes(k_pad)});
  };
  const bool packed = of.bf16();  // rows of the product, whose further columns are zeros yet
  for (int first = 0; first < item.count && (bias || !packed); first += kPackRows) {
    const int count = std::min(kPackRows, item.count - first);
    for (int column = 0; column < shape_.hidden; column += kPiece) {
      const int columns = std::min(kPiece, shape_.hidden - column), ld = round_up(columns, kChunk);
      source.copy(kernels_, first, count, column, columns, rows);
      if (bias)
        for (int i = 0; i < count; ++i)
          of_bias[first + i] += kernels_.rows->dot(rows + int64_t{i} * ld, bias + column, columns);
      if (!down_.rank || packed) continue;
      turn(column, columns, ld);
      of.multiply({.a = rows,
                   .a_stride = ld,
                   .m = count,
                   .k = columns,
                   .turned = mine + places_.turned,
                   .blocks = down_.width / kBlockRows,
                   .out = more,
                   .out_stride = down_.width},
                  mine + places_.multiply);
      kernels_.add_scaled(read + int64_t{first} * down_.width, more, f.scale, count * down_.width);
    }
  }
  if (down_.rank && packed) {
    const Acts acts = rows_of(parts_[item.group].down.acts, item.begin, item.count, group.m);
    turn(0, shape_.hidden, plain_down_.k_pad);
    of.multiply_packed(acts, item.count, mine + places_.turned, down_.width / kBlockRows, more, down_.width,
                       mine + places_.multiply);
    kernels_.add_scaled(read, more, f.scale, item.count * down_.width);
  }
  if (!down_.rank) return;
  float* const weighted = down_.weighted + row * down_.width;
  for (int i = 0; i < item.count; ++i)
    for (int r = 0; r < down_.width; ++r)
      weighted[int64_t{i} * down_.width + r] = routing_.weight[row + i] * read[int64_t{i} * down_.width + r];
  if (packed) pack_factor({group, item.begin, item.count}, read, down_, parts_[item.group].down, down_k_);
}

// What a factor made of rows, [rows, width], to the columns of a product's rows behind the others; zeros in a group of
// few.
void NodeBackward::pack_factor(const Rows& rows, const float* from, const Factors& f, const Product& to,
                               int column) noexcept {
  kernels_.pack_acts({.source = from,
                      .stride = f.width,
                      .m = rows.count,
                      .k = takes_bf16(rows.group.m) ? f.rank : 0,
                      .last = to.acts.shape.k_pad - column,
                      .out = columns_of(rows_of(to.acts, rows.first, rows.count, rows.group.m), column)});
}

void NodeBackward::middle(const WorkItem& item, std::byte* mine) noexcept {
  const ExpertGroup& group = routing_.groups[item.group];
  const Product& down = parts_[item.group].down;
  const int span = item.begin / kSpan, wide = wide_columns(group.m);
  list_.wait(item, kRead, item.group);
  const size_t all = routing_.token.size();
  std::fill_n(weights_ + (1 + span) * all + group.first, group.m, 0.0f);
  for (Factors* f : {&gate_up_, &down_})
    std::fill_n(f->sums + (span * all + group.first) * f->width, int64_t{group.m} * f->width, 0.0f);
  for (int column = item.begin; column < item.begin + item.count; column += wide) {
    const int chunks = ceil_div(std::min(wide, item.begin + item.count - column), kChunk);
    fill_down_panel(group, column, chunks, mine + places_.panel);
    for (int first = 0; first < group.m; first += kRows) {
      const Rows rows{group, first, std::min(kRows, group.m - first)};
      Tile tile{.grad = reinterpret_cast<float*>(mine + places_.tile),
                .mid = reinterpret_cast<float*>(mine + places_.mid),
                .ld = chunks * kChunk};
      down.plan.multiply({.packing = &plain_down_,
                          .blocks = mine + places_.panel,
                          .count = chunks * kPanelBlocks,
                          .acts = rows_of(down.acts, rows.first, rows.count, group.m),
                          .m = rows.count,
                          .out = tile.grad,
                          .ld = tile.ld,
                          .scratch = mine + places_.multiply});
      for (int c = 0; c < chunks; ++c, tile.grad += kChunk, tile.mid += kChunk) {
        const Columns columns = columns_at(column + c * kChunk);
        if (columns.count > 0)
          middle_rows(rows, columns, tile, span, mine);
        else  // columns that only fill up a part
          std::memset(mine + places_.both, 0, size_t{2} * kChunk * rows.count * sizeof(float));
        if (args_.input_grad) pack_both(rows, columns, parts_[item.group].gate_up, mine);
      }
    }
  }
}

void NodeBackward::transpose(const ExpertGroup& group, const StoredBlocks& of, const Stored& from,
                             const Packing& panel, std::byte* out) noexcept {
  const std::byte* block = shard_.block(group.expert, of, 0);
  const auto at =
      [&](int column) {  // of a row block's bytes, roughly: what is fetched ahead need not be exact
        return of.packing.block_bytes / kChunk * static_cast<size_t>(column) / (of.packing.k_pad / kChunk);
      };
  const size_t begin = at(from.first), bytes = at(from.first + from.chunks * kChunk) - begin;
  for (int b = 0; b < from.blocks; ++b, block += from.stride) {
    const bool last = b + 1 == from.blocks;
    for (size_t line = 0; line < bytes && !last; line += 64)
      __builtin_prefetch(block + from.stride + begin + line, 0, 2);
    for (int c = 0; c < from.chunks; ++c)
      transpose_({.packing = &of.packing,
                  .blocks = block,
                  .count = 1,
                  .first = from.first + c * kChunk,
                  .row = from.row + b * kBlockRows,
                  .last = last,
                  .out = out + c * kPanelBlocks * panel.block_bytes,
                  .out_stride = static_cast<int64_t>(panel.block_bytes)});
  }
}

void NodeBackward::fill_down_panel(const ExpertGroup& group, int column, int chunks,
                                   std::byte* panel) noexcept {
  const StoredBlocks& down = shard_.down;
  transpose(group, down,
            {.stride = static_cast<int64_t>(down.stride),
             .blocks = static_cast<int>(down.packing.blocks),
             .first = column,
             .chunks = chunks},
            plain_down_, panel);
  if (!down_.rank || !factors_bf16_) return;
  const LowRank& f = args_.lora.down;
  for (int c = 0; c < chunks; ++c) {
    const Columns columns = columns_at(column + c * kChunk);
    bf16_.turn({.from = f.a + int64_t{group.expert} * f.rank * shape_.inter + columns.first,
                .k_step = shape_.inter,
                .lane_step = 1,
                .k = columns.count > 0 && takes_bf16(group.m) ? f.rank : 0,
                .lanes = columns.count,
                .blocks = kPanelBlocks,
                .k_pad = plain_down_.k_pad - down_k_,
                .out = panel + c * kPanelBlocks * plain_down_.block_bytes + down_k_ * bf16_.row_bytes(),
                .out_stride = static_cast<int64_t>(plain_down_.block_bytes)});
  }
}

// What meets rows of these columns: A of down, then B of gate|up.
void NodeBackward::turn_middle(const ExpertGroup& group, const Columns& columns, std::byte* turned) noexcept {
  const FactorProducts& of = products(group.m);
  if (const LowRank& f = args_.lora.down; down_.rank) {
    of.turn({.from = f.a + int64_t{group.expert} * f.rank * shape_.inter + columns.first,
             .k_step = 1,
             .lane_step = shape_.inter,
             .k = columns.count,
             .lanes = f.rank,
             .blocks = down_.width / kBlockRows,
             .k_pad = kChunk,
             .out = turned,
             .out_stride = of.block_bytes(kChunk)});
    turned += down_.width / kBlockRows * of.block_bytes(kChunk);
  }
  if (!gate_up_.rank) return;
  const LowRank& f = args_.lora.gate_up;
  const int blocks = gate_up_.width / kBlockRows;
  const int64_t stride = of.block_bytes(2 * kChunk);
  std::memset(turned, 0, static_cast<size_t>(blocks * stride));
  for (int half = 0; half < 2; ++half)
    for (int block = 0; block * kBlockRows < columns.count; ++block) {
      const int64_t row =
          (2 * int64_t{group.expert} + half) * shape_.inter + columns.first + block * kBlockRows;
      of.turn({.from = f.b + row * f.rank,
               .k_step = f.rank,
               .lane_step = 1,
               .k = std::min(kBlockRows, columns.count - block * kBlockRows),
               .lanes = f.rank,
               .blocks = blocks,
               .k_pad = kBlockRows,
               .out = turned + (half * tile_up_at() + block * shard_.block_step()) * of.row_bytes(),
               .out_stride = stride});
    }
}

void NodeBackward::middle_rows(const Rows& rows, const Columns& columns, const Tile& tile, int span,
                               std::byte* mine) noexcept {
  auto* const both = reinterpret_cast<float*>(mine + places_.both);
  if (down_.rank && !takes_bf16(rows.group.m)) {
    const LowRank& f = args_.lora.down;
    add_factor(rows,
               {.factors = &down_,
                .from = down_.read + rows.at() * down_.width,
                .turn = {.from = f.a + int64_t{rows.group.expert} * f.rank * shape_.inter + columns.first,
                         .k_step = shape_.inter,
                         .lane_step = 1,
                         .k = f.rank,
                         .lanes = columns.count,
                         .blocks = kPanelBlocks}},
               tile.grad, tile.ld, mine);
  }
  const int64_t size = static_cast<int64_t>(bytes_of(kept_type_)), at = columns.column / kBlockRows;
  const std::byte* kept = kept_ + (rows.at() * shard_.both() + at * shard_.block_step()) * size;
  const auto bias = [&](const std::vector<float>& all) {
    return all.empty() ? nullptr : all.data() + rows.group.expert * shard_.width() + columns.column;
  };
  back_.activate_back({.gate = kept,
                       .up = kept + shard_.up_at() * size,
                       .type = kept_type_,
                       .stride = shard_.both(),
                       .step = shard_.block_step(),
                       .gate_bias = bias(shard_.gate_bias),
                       .up_bias = bias(shard_.up_bias),
                       .activation = state_.options.activation,
                       .m = rows.count,
                       .columns = columns.count,
                       .blocks = kPanelBlocks,
                       .weights = routing_.weight.data() + rows.at(),
                       .mid_grad = tile.grad,
                       .ld = tile.ld,
                       .mid = tile.mid,
                       .gate_grad = both,
                       .up_grad = both + tile_up_at(),
                       .out_ld = 2 * kChunk,
                       .out_step = shard_.block_step(),
                       .weights_grad = weights_ + (1 + span) * routing_.token.size() + rows.at()});
  if (args_.lora.empty()) return;
  turn_middle(rows.group, columns, mine + places_.turned);
  add_middle_factors(rows, columns, tile, span, mine);
}

void NodeBackward::add_factor(const Rows& rows, const Added& what, float* tile, int ld,
                              std::byte* mine) noexcept {
  auto* const more = reinterpret_cast<float*>(mine + places_.more);
  FactorProducts::Turn turn = what.turn;
  turn.out = mine + places_.turned;
  turn.out_stride = f32_.block_bytes(turn.k);
  f32_.turn(turn);
  const int columns = turn.blocks * kBlockRows;
  f32_.multiply({.a = what.from,
                 .a_stride = what.factors->width,
                 .m = rows.count,
                 .k = turn.k,
                 .turned = turn.out,
                 .blocks = turn.blocks,
                 .out = more,
                 .out_stride = columns},
                {});
  for (int i = 0; i < rows.count; ++i)
    kernels_.add_scaled(tile + int64_t{i} * ld, more + int64_t{i} * columns, 1.0f, columns);
}

// Sums over columns, for dT and td; sums over rows, of the factors whose columns or rows these are.
void NodeBackward::add_middle_factors(const Rows& rows, const Columns& columns, const Tile& tile, int span,
                                      std::byte* mine) noexcept {
  const auto* const both = reinterpret_cast<const float*>(mine + places_.both);
  auto* const more = reinterpret_cast<float*>(mine + places_.more);
  std::byte *const scratch = mine + places_.multiply, *turned = mine + places_.turned;
  const FactorProducts& of = products(rows.group.m);
  const auto add = [&](const Factors& f, const float* a, int64_t stride, int k) {
    of.multiply({.a = a,
                 .a_stride = stride,
                 .m = rows.count,
                 .k = k,
                 .turned = turned,
                 .blocks = f.width / kBlockRows,
                 .out = more,
                 .out_stride = f.width},
                scratch);
    kernels_.add_scaled(f.sums + (span * routing_.token.size() + rows.at()) * f.width, more, 1.0f,
                        rows.count * f.width);
  };
  if (down_.rank) {
    add(down_, tile.mid, tile.ld, columns.count);
    turned += down_.width / kBlockRows * of.block_bytes(kChunk);
    if (float* out = args_.lora_grads.down_a)
      of.outer_sum({.a = down_.weighted + rows.at() * down_.width,
                    .a_ld = down_.width,
                    .a_columns = down_.rank,
                    .b = tile.mid,
                    .b_ld = tile.ld,
                    .b_columns = columns.count,
                    .rows = rows.count,
                    .out = out + int64_t{rows.group.expert} * down_.rank * shape_.inter + columns.first,
                    .out_ld = shape_.inter},
                   scratch);
  }
  if (!gate_up_.rank) return;
  add(gate_up_, both, 2 * kChunk, 2 * kChunk);
  if (!args_.lora_grads.gate_up_b) return;
  // Of all 128 columns, [rank, 128], then to the rows of B that these are.
  std::fill_n(more, int64_t{gate_up_.rank} * 2 * kChunk, 0.0f);
  of.outer_sum({.a = gate_up_.read + rows.at() * gate_up_.rank,
                .a_ld = gate_up_.rank,
                .a_columns = gate_up_.rank,
                .b = both,
                .b_ld = 2 * kChunk,
                .b_columns = 2 * kChunk,
                .rows = rows.count,
                .out = more,
                .out_ld = 2 * kChunk},
               scratch);
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < columns.count; ++i) {
      const int64_t row = (2 * int64_t{rows.group.expert} + half) * shape_.inter + columns.first + i;
      const float* const from =
          more + half * tile_up_at() + i / kBlockRows * shard_.block_step() + i % kBlockRows;
      float* const to = args_.lora_grads.gate_up_b + row * gate_up_.rank;
      for (int r = 0; r < gate_up_.rank; ++r) to[r] += from[r * 2 * kChunk];
    }
}

// [dg|du] of the tile to its columns of the next product's rows.
void NodeBackward::pack_both(const Rows& rows, const Columns& columns, const Product& to,
                             std::byte* mine) noexcept {
  const Acts out = rows_of(to.acts, rows.first, rows.count, rows.group.m);
  const auto pack = [&](int64_t from, int64_t column, int count) {
    Acts at = columns_of(out, static_cast<int>(column));
    kernels_.pack_acts({.source = reinterpret_cast<const float*>(mine + places_.both) + from,
                        .stride = 2 * kChunk,
                        .m = rows.count,
                        .k = count,
                        .last = count,
                        .out = at});
  };
  if (shard_.paired) {
    const int column = 2 * columns.column;
    pack(0, column, std::min(2 * kChunk, both_k_ - column));
  } else {
    pack(0, columns.column, kChunk);
    pack(kChunk, shard_.up_at() + columns.column, kChunk);
  }
}

void NodeBackward::sum_spans(const WorkItem& item) noexcept {
  list_.wait(item, kMiddle, item.group);
  const ExpertGroup& group = routing_.groups[item.group];
  const size_t all = routing_.token.size();
  float* const weights = weights_ + group.first;
  for (int s = 0; s < spans(); ++s) kernels_.add_scaled(weights, weights + (1 + s) * all, 1.0f, group.m);
  for (Factors* f : {&gate_up_, &down_}) {
    float* const sums = f->sums + static_cast<int64_t>(group.first) * f->width;
    for (int s = 1; s < spans(); ++s)
      kernels_.add_scaled(sums, sums + s * all * f->width, 1.0f, group.m * f->width);
  }
  for (int i = 0; i < group.m; ++i) {
    const int row = group.first + i;
    const auto scale = [&](const Factors& f, float by) {
      for (int r = 0; r < f.width; ++r) f.sums[int64_t{row} * f.width + r] *= by;
    };
    scale(gate_up_, args_.lora.gate_up.scale);
    scale(down_, args_.lora.down.scale * routing_.weight[row]);
    if (direct_ && args_.weights_grad) args_.weights_grad[routing_.pair[row]] = weights_[row];
  }
  if (gate_up_.rank && args_.input_grad && factors_bf16_)
    pack_factor({group, 0, group.m}, gate_up_.sums + int64_t{group.first} * gate_up_.width, gate_up_,
                parts_[item.group].gate_up, both_k_);
}

void NodeBackward::add_factors(int g, std::byte* mine) const noexcept {
  std::byte* const scratch = mine + places_.multiply;
  const ExpertGroup& group = routing_.groups[g];
  const ForwardArgs& call = args_.call;
  if (float* out = args_.lora_grads.gate_up_a; out && gate_up_.rank)
    products(group.m).outer_sum({.a = gate_up_.sums + int64_t{group.first} * gate_up_.width,
                                 .a_ld = gate_up_.width,
                                 .a_columns = gate_up_.rank,
                                 .b = call.input,
                                 .b_type = call.input_type,
                                 .b_ld = call.input_stride ? call.input_stride : shape_.hidden,
                                 .b_columns = shape_.hidden,
                                 .index = routing_.tokens_of(group),
                                 .rows = group.m,
                                 .out = out + int64_t{group.expert} * gate_up_.rank * shape_.hidden,
                                 .out_ld = shape_.hidden},
                                scratch);
  if (float* out = args_.lora_grads.down_b; out && down_.rank)
    products(group.m).outer_sum({.a = down_.sums + int64_t{group.first} * down_.width,
                                 .a_ld = down_.width,
                                 .a_columns = down_.rank,
                                 .b = args_.output_grad,
                                 .b_type = args_.output_grad_type,
                                 .b_ld = args_.output_grad_stride ? args_.output_grad_stride : shape_.hidden,
                                 .b_columns = shape_.hidden,
                                 .index = routing_.tokens_of(group),
                                 .rows = group.m,
                                 .out = out + int64_t{group.expert} * shape_.hidden * down_.rank,
                                 .out_ld = 1,
                                 .out_step = down_.rank},
                                scratch);
}

void NodeBackward::fill_gate_up_panel(const ExpertGroup& group, const WorkItem& columns,
                                      std::byte* panel) noexcept {
  const int chunks = ceil_div(columns.count, kChunk), blocks = static_cast<int>(shard_.gate.packing.blocks);
  const auto part = [&](const StoredBlocks& of, int count, int row) {
    transpose(group, of,
              {.stride = static_cast<int64_t>(of.packing.block_bytes),
               .blocks = count,
               .first = columns.begin,
               .chunks = chunks,
               .row = row},
              plain_gate_up_, panel);
  };
  part(shard_.gate, shard_.paired ? 2 * blocks : blocks, 0);
  if (!shard_.paired) part(shard_.up, blocks, static_cast<int>(shard_.up_at()));
  if (!gate_up_.rank || !factors_bf16_) return;
  const LowRank& f = args_.lora.gate_up;
  bf16_.turn({.from = f.a + int64_t{group.expert} * f.rank * shape_.hidden + columns.begin,
              .k_step = shape_.hidden,
              .lane_step = 1,
              .k = takes_bf16(group.m) ? f.rank : 0,
              .lanes = columns.count,
              .blocks = chunks * kPanelBlocks,
              .k_pad = plain_gate_up_.k_pad - both_k_,
              .out = panel + both_k_ * bf16_.row_bytes(),
              .out_stride = static_cast<int64_t>(plain_gate_up_.block_bytes)});
}

void NodeBackward::input(const WorkItem& item, std::byte* mine) noexcept {
  const int tokens = args_.call.tokens, chunks = ceil_div(item.count, kChunk), ld = chunks * kChunk;
  auto* const tile = reinterpret_cast<float*>(mine + places_.tile);
  auto* const y = reinterpret_cast<float*>(mine + places_.y);  // [tokens, ld]
  std::fill_n(y, int64_t{tokens} * ld, 0.0f);
  for (int g = 0; g < static_cast<int>(routing_.groups.size()); ++g) {
    const ExpertGroup& group = routing_.groups[g];
    const Product& both = parts_[g].gate_up;
    list_.wait(item, kSums, g);
    fill_gate_up_panel(group, item, mine + places_.panel);
    for (int first = 0; first < group.m; first += kRows) {
      const Rows rows{group, first, std::min(kRows, group.m - first)};
      both.plan.multiply({.packing = &plain_gate_up_,
                          .blocks = mine + places_.panel,
                          .count = chunks * kPanelBlocks,
                          .acts = rows_of(both.acts, first, rows.count, group.m),
                          .m = rows.count,
                          .out = tile,
                          .ld = ld,
                          .scratch = mine + places_.multiply});
      if (const LowRank& f = args_.lora.gate_up; gate_up_.rank && !takes_bf16(group.m))
        add_factor(rows,
                   {.factors = &gate_up_,
                    .from = gate_up_.sums + rows.at() * gate_up_.width,
                    .turn = {.from = f.a + int64_t{group.expert} * f.rank * shape_.hidden + item.begin,
                             .k_step = shape_.hidden,
                             .lane_step = 1,
                             .k = f.rank,
                             .lanes = item.count,
                             .blocks = chunks * kPanelBlocks}},
                   tile, ld, mine);
      for (int i = 0; i < rows.count; ++i)
        kernels_.add_scaled(y + int64_t{routing_.token[rows.at() + i]} * ld, tile + int64_t{i} * ld, 1.0f,
                            ld);
    }
  }
  float* const out = direct_ ? args_.input_grad : input_;
  for (int t = 0; t < tokens; ++t)
    std::memcpy(out + int64_t{t} * shape_.hidden + item.begin, y + int64_t{t} * ld,
                item.count * sizeof(float));
}

NodeBackward::Sums NodeBackward::sums() const {
  return {.input = input_,
          .weights = weights_,
          .t = gate_up_.sums,
          .td = down_.sums,
          .t_width = gate_up_.width,
          .td_width = down_.width};
}

}  // namespace kt::inline nn
