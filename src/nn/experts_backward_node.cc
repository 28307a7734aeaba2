#include "nn/experts_backward_node.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "kernels/gram.h"
#include "kernels/row_ops.h"
#include "nn/float_rows.h"
#include "nn/lora_adapter.h"

namespace kt::inline nn {
namespace {

constexpr int kPackRows = 32;      // rows of a pack item
constexpr int kPiece = 256;        // columns of them that are read as f32 at once
constexpr int kRows = kManyRows;   // rows of a product, whose sums stay in a core's cache
constexpr int kSpan = 4 * kChunk;  // columns of `inter` of a middle item
constexpr int kPanelBlocks = kChunk / kBlockRows;
constexpr Format kBf16Panel{Code::kBf16, 0, Scale::kNone, Min::kNone, {}};
constexpr Format kF32Panel{Code::kF32, 0, Scale::kNone, Min::kNone, {}};

int width_of(const LowRank& f) { return f.empty() ? 0 : round_up(f.rank, kBlockRows); }

// A factor as the right operand of a product: out[block, k, lane], 16 lanes a block and `out_stride` floats from one to
// the next. Number (k, lane) stands at k * k_step + lane * lane_step; there are `lanes` of these, then zeros.
struct Turn {
  const float* from = nullptr;
  int64_t k_step = 0, lane_step = 0;
  int k = 0, lanes = 0, blocks = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
};
void turn(const Turn& t) {
  for (int b = 0; b < t.blocks; ++b) {
    const int lanes = std::clamp(t.lanes - b * kBlockRows, 0, kBlockRows);
    for (int k = 0; k < t.k; ++k) {
      const float* from = t.from + k * t.k_step + b * kBlockRows * t.lane_step;
      float* to = t.out + b * t.out_stride + k * kBlockRows;
      for (int i = 0; i < lanes; ++i) to[i] = from[i * t.lane_step];
      for (int i = lanes; i < kBlockRows; ++i) to[i] = 0;
    }
  }
}

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
      direct_(s.direct) {}

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
  const bool bf16 = kept_type_ == Real::kBf16 && back_.transpose_bf16;
  const Format& format = bf16 ? kBf16Panel : kF32Panel;
  const Route route = bf16 ? Route::kManyBf16 : Route::kManyF32;
  transpose_ = bf16 ? back_.transpose_bf16 : back_.transpose_f32;
  plain_down_ = packing_for(format, kChunk, shape_.hidden, kernels_.fragment, "down");
  plain_gate_up_ = packing_for(format, kChunk, shard_.both(), kernels_.fragment, "gate and up");
  parts_.resize(routing_.groups.size());
  for (size_t g = 0; g < parts_.size(); ++g) {
    const auto plan = [&](Product& product, const Packing& panel) {
      product.plan = plan_route(kernels_, panel, route, routing_.groups[g].m);
      product.at = memory_.take(act_bytes(product.plan.acts));
    };
    plan(parts_[g].down, plain_down_);
    if (args_.input_grad) plan(parts_[g].gate_up, plain_gate_up_);
    multiply_bytes_ = std::max(multiply_bytes_, parts_[g].down.plan.scratch_bytes);
  }
}

void NodeBackward::list_items() {
  const int groups = static_cast<int>(routing_.groups.size());
  list_.clear(kStages, groups);
  for (int g = 0; g < groups; ++g) list_.add_pieces(kPack, g, routing_.groups[g].m, kPackRows);
  for (int g = 0; g < groups; ++g) list_.add_pieces(kMiddle, g, shard_.end - shard_.begin, kSpan);
  for (int g = 0; g < groups; ++g) list_.add({kSums, g, 0, 1});
  if (direct_ && !args_.lora.empty())
    for (int g = 0; g < groups; ++g) list_.add({kFactors, g, 0, 1});
  if (args_.input_grad) list_.add_pieces(kInput, 0, shape_.hidden, kChunk);
}

void NodeBackward::lay_out_worker() {
  const size_t most_rows = std::min<size_t>(kRows, std::ranges::max(routing_.groups, {}, &ExpertGroup::m).m);
  const size_t rows = round_up(most_rows, size_t{kPackRows}), lines = kChunk * sizeof(float);
  const size_t wide = std::max({kChunk, gate_up_.width, down_.width});
  const size_t turned = std::max<size_t>({size_t{kPiece} * down_.width,
                                          size_t{kChunk} * (down_.rank + down_.width + 2 * gate_up_.width),
                                          size_t{kChunk} * gate_up_.rank});
  size_t at = 0;
  const auto place = [&](size_t bytes) {
    const size_t here = at;
    at += round_up(bytes, size_t{64});
    return here;
  };
  places_.multiply = place(multiply_bytes_);
  places_.panel = place(kPanelBlocks * std::max(plain_down_.block_bytes, plain_gate_up_.block_bytes));
  places_.tile = place(std::max(rows * lines, kPackRows * kPiece * sizeof(float)));
  places_.mid = place(rows * lines);
  places_.both = place(2 * rows * lines);
  places_.more = place(rows * wide * sizeof(float));
  places_.turned = place(turned * sizeof(float));
  places_.y = place(args_.input_grad ? args_.call.tokens * lines : 0);
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
        return pack(item, mine);
      case kMiddle:
        return middle(item, mine);
      case kSums:
        return sum_spans(item);
      case kFactors:
        list_.wait(item, kSums, item.group);
        return add_factors(item.group);
      case kInput:
        return input(item, mine);
      case kStages:
        break;
    }
  });
}

void NodeBackward::pack(const WorkItem& item, std::byte* mine) noexcept {
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
  read_output_grad(item, mine);
  if (!gate_up_.rank) return;
  const ForwardArgs& call = args_.call;
  adapter_.read({.input = ExpertAdapter::Input::kTokens,
                 .expert = group.expert,
                 .count = item.count,
                 .columns = shape_.hidden,
                 .tokens = tokens,
                 .source = call.input,
                 .type = call.input_type,
                 .stride = call.input_stride ? call.input_stride : shape_.hidden,
                 .kept = gate_up_.read + (group.first + item.begin) * gate_up_.rank});
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
  auto* const turned = reinterpret_cast<float*>(mine + places_.turned);
  const FloatRows source{.source = args_.output_grad,
                         .type = args_.output_grad_type,
                         .stride = args_.output_grad_stride ? args_.output_grad_stride : shape_.hidden,
                         .index = routing_.tokens_of(group) + item.begin};
  for (int column = 0; column < shape_.hidden; column += kPiece) {
    const int columns = std::min(kPiece, shape_.hidden - column), ld = round_up(columns, kChunk);
    source.copy(kernels_, 0, item.count, column, columns, rows);
    if (bias)
      for (int i = 0; i < item.count; ++i)
        of_bias[i] += kernels_.rows->dot(rows + int64_t{i} * ld, bias + column, columns);
    if (!down_.rank) continue;
    turn({.from = f.b + (int64_t{group.expert} * shape_.hidden + column) * f.rank,
          .k_step = f.rank,
          .lane_step = 1,
          .k = columns,
          .lanes = f.rank,
          .blocks = down_.width / kBlockRows,
          .out = turned,
          .out_stride = int64_t{columns} * kBlockRows});
    gram_kernels(kernels_).product_f32({.a = rows,
                                        .a_stride = ld,
                                        .m = item.count,
                                        .k = columns,
                                        .b = turned,
                                        .b_stride = int64_t{columns} * kBlockRows,
                                        .blocks = down_.width / kBlockRows,
                                        .out = more,
                                        .out_stride = down_.width});
    kernels_.add_scaled(read, more, f.scale, item.count * down_.width);
  }
  float* const weighted = down_.weighted + row * down_.width;
  for (int i = 0; i < item.count; ++i)
    for (int r = 0; r < down_.width; ++r)
      weighted[int64_t{i} * down_.width + r] = routing_.weight[row + i] * read[int64_t{i} * down_.width + r];
}

void NodeBackward::middle(const WorkItem& item, std::byte* mine) noexcept {
  const ExpertGroup& group = routing_.groups[item.group];
  const int span = item.begin / kSpan;
  list_.wait(item, kPack, item.group);
  const size_t rows = routing_.token.size();
  std::fill_n(weights_ + (1 + span) * rows + group.first, group.m, 0.0f);
  for (Factors* f : {&gate_up_, &down_})
    std::fill_n(f->sums + (span * rows + group.first) * f->width, int64_t{group.m} * f->width, 0.0f);
  for (int column = item.begin; column < item.begin + item.count; column += kChunk) {
    const Columns columns = columns_at(column);
    if (columns.count > 0) {
      transpose_({.packing = &shard_.down.packing,
                  .blocks = shard_.block(group.expert, shard_.down, 0),
                  .stride = static_cast<int64_t>(shard_.down.stride),
                  .count = static_cast<int>(shard_.down.packing.blocks),
                  .first = column,
                  .out = mine + places_.panel,
                  .out_stride = static_cast<int64_t>(plain_down_.block_bytes)});
      turn_middle(group, columns, mine);
    }
    for (int first = 0; first < group.m; first += kRows) {
      const Rows some{group, first, std::min(kRows, group.m - first)};
      if (columns.count > 0)
        middle_rows(some, columns, item, mine);
      else  // columns that only fill up a part
        std::memset(mine + places_.both, 0, size_t{2} * kChunk * some.count * sizeof(float));
      if (args_.input_grad) pack_both(some, columns, parts_[item.group].gate_up, mine);
    }
  }
}

// What meets rows of these columns: A of down both ways, then B of gate|up.
void NodeBackward::turn_middle(const ExpertGroup& group, const Columns& columns, std::byte* mine) noexcept {
  auto* to = reinterpret_cast<float*>(mine + places_.turned);
  if (const LowRank& f = args_.lora.down; down_.rank) {
    const float* a = f.a + int64_t{group.expert} * f.rank * shape_.inter + columns.first;
    turn({.from = a,
          .k_step = shape_.inter,
          .lane_step = 1,
          .k = f.rank,
          .lanes = columns.count,
          .blocks = kPanelBlocks,
          .out = to,
          .out_stride = int64_t{f.rank} * kBlockRows});
    to += kChunk * f.rank;
    turn({.from = a,
          .k_step = 1,
          .lane_step = shape_.inter,
          .k = columns.count,
          .lanes = f.rank,
          .blocks = down_.width / kBlockRows,
          .out = to,
          .out_stride = kChunk * kBlockRows});
    to += kChunk * down_.width;
  }
  if (!gate_up_.rank) return;
  const LowRank& f = args_.lora.gate_up;
  std::fill_n(to, 2 * kChunk * gate_up_.width, 0.0f);
  for (int half = 0; half < 2; ++half)
    for (int block = 0; block * kBlockRows < columns.count; ++block) {
      const int64_t row =
          (2 * int64_t{group.expert} + half) * shape_.inter + columns.first + block * kBlockRows;
      turn({.from = f.b + row * f.rank,
            .k_step = f.rank,
            .lane_step = 1,
            .k = std::min(kBlockRows, columns.count - block * kBlockRows),
            .lanes = f.rank,
            .blocks = gate_up_.width / kBlockRows,
            .out = to + (half * tile_up_at() + block * shard_.block_step()) * kBlockRows,
            .out_stride = 2 * kChunk * kBlockRows});
    }
}

void NodeBackward::middle_rows(const Rows& rows, const Columns& columns, const WorkItem& item,
                               std::byte* mine) noexcept {
  const Product& down = parts_[item.group].down;
  const int span = item.begin / kSpan;
  auto* const tile = reinterpret_cast<float*>(mine + places_.tile);
  auto* const both = reinterpret_cast<float*>(mine + places_.both);
  down.plan.multiply({.packing = &plain_down_,
                      .blocks = mine + places_.panel,
                      .count = kPanelBlocks,
                      .acts = rows_of(down.acts, rows.first, rows.count, rows.group.m),
                      .m = rows.count,
                      .out = tile,
                      .ld = kChunk,
                      .scratch = mine + places_.multiply});
  if (down_.rank) {
    auto* const more = reinterpret_cast<float*>(mine + places_.more);
    gram_kernels(kernels_).product_f32({.a = down_.read + rows.at() * down_.width,
                                        .a_stride = down_.width,
                                        .m = rows.count,
                                        .k = down_.rank,
                                        .b = reinterpret_cast<const float*>(mine + places_.turned),
                                        .b_stride = int64_t{down_.rank} * kBlockRows,
                                        .blocks = kPanelBlocks,
                                        .out = more,
                                        .out_stride = kChunk});
    kernels_.add_scaled(tile, more, 1.0f, rows.count * kChunk);
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
                       .mid_grad = tile,
                       .ld = kChunk,
                       .mid = reinterpret_cast<float*>(mine + places_.mid),
                       .gate_grad = both,
                       .up_grad = both + tile_up_at(),
                       .out_ld = 2 * kChunk,
                       .out_step = shard_.block_step(),
                       .weights_grad = weights_ + (1 + span) * routing_.token.size() + rows.at()});
  add_middle_factors(rows, columns, span, mine);
}

// Sums over columns, for dT and td; sums over rows, of the factors whose columns or rows these are.
void NodeBackward::add_middle_factors(const Rows& rows, const Columns& columns, int span,
                                      std::byte* mine) noexcept {
  const auto* const mid = reinterpret_cast<const float*>(mine + places_.mid);
  const auto* const both = reinterpret_cast<const float*>(mine + places_.both);
  auto* const more = reinterpret_cast<float*>(mine + places_.more);
  const auto* turned = reinterpret_cast<const float*>(mine + places_.turned);
  const auto add = [&](const Factors& f, const float* a, int stride, int k, int k_pad) {
    gram_kernels(kernels_).product_f32({.a = a,
                                        .a_stride = stride,
                                        .m = rows.count,
                                        .k = k,
                                        .b = turned,
                                        .b_stride = int64_t{k_pad} * kBlockRows,
                                        .blocks = f.width / kBlockRows,
                                        .out = more,
                                        .out_stride = f.width});
    kernels_.add_scaled(f.sums + (span * routing_.token.size() + rows.at()) * f.width, more, 1.0f,
                        rows.count * f.width);
  };
  if (down_.rank) {
    turned += kChunk * down_.rank;
    add(down_, mid, kChunk, columns.count, kChunk);
    turned += kChunk * down_.width;
    if (float* out = args_.lora_grads.down_a)
      back_.outer_sum({.a = down_.weighted + rows.at() * down_.width,
                       .a_ld = down_.width,
                       .a_columns = down_.rank,
                       .b = mid,
                       .b_ld = kChunk,
                       .b_columns = columns.count,
                       .rows = rows.count,
                       .out = out + int64_t{rows.group.expert} * down_.rank * shape_.inter + columns.first,
                       .out_ld = shape_.inter});
  }
  if (!gate_up_.rank) return;
  add(gate_up_, both, 2 * kChunk, 2 * kChunk, 2 * kChunk);
  if (!args_.lora_grads.gate_up_b) return;
  for (int half = 0; half < 2; ++half)
    for (int block = 0; block * kBlockRows < columns.count; ++block) {
      const int64_t row =
          (2 * int64_t{rows.group.expert} + half) * shape_.inter + columns.first + block * kBlockRows;
      back_.outer_sum({.a = gate_up_.read + rows.at() * gate_up_.rank,
                       .a_ld = gate_up_.rank,
                       .a_columns = gate_up_.rank,
                       .b = both + half * tile_up_at() + block * shard_.block_step(),
                       .b_ld = 2 * kChunk,
                       .b_columns = std::min(kBlockRows, columns.count - block * kBlockRows),
                       .rows = rows.count,
                       .out = args_.lora_grads.gate_up_b + row * gate_up_.rank,
                       .out_ld = 1,
                       .out_step = gate_up_.rank});
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
  const int k_pad = out.shape.k_pad;
  if (shard_.paired) {
    const int column = 2 * columns.column;
    pack(0, column, std::min(2 * kChunk, k_pad - column));
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
}

void NodeBackward::add_factors(int g) const noexcept {
  const ExpertGroup& group = routing_.groups[g];
  const ForwardArgs& call = args_.call;
  if (float* out = args_.lora_grads.gate_up_a; out && gate_up_.rank)
    back_.outer_sum({.a = gate_up_.sums + int64_t{group.first} * gate_up_.width,
                     .a_ld = gate_up_.width,
                     .a_columns = gate_up_.rank,
                     .b = call.input,
                     .b_type = call.input_type,
                     .b_ld = call.input_stride ? call.input_stride : shape_.hidden,
                     .b_columns = shape_.hidden,
                     .index = routing_.tokens_of(group),
                     .rows = group.m,
                     .out = out + int64_t{group.expert} * gate_up_.rank * shape_.hidden,
                     .out_ld = shape_.hidden});
  if (float* out = args_.lora_grads.down_b; out && down_.rank)
    back_.outer_sum({.a = down_.sums + int64_t{group.first} * down_.width,
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
                     .out_step = down_.rank});
}

void NodeBackward::transpose_gate_up(const ExpertGroup& group, int first, std::byte* panel) noexcept {
  const auto transpose = [&](const StoredBlocks& of, int count, int row) {
    transpose_({.packing = &of.packing,
                .blocks = shard_.block(group.expert, of, 0),
                .count = count,
                .first = first,
                .row = row,
                .out = panel,
                .out_stride = static_cast<int64_t>(plain_gate_up_.block_bytes)});
  };
  const int blocks = static_cast<int>(shard_.gate.packing.blocks);
  if (shard_.paired) return transpose(shard_.gate, 2 * blocks, 0);
  transpose(shard_.gate, blocks, 0);
  transpose(shard_.up, blocks, static_cast<int>(shard_.up_at()));
}

void NodeBackward::input(const WorkItem& item, std::byte* mine) noexcept {
  const int tokens = args_.call.tokens;
  auto* const tile = reinterpret_cast<float*>(mine + places_.tile);
  auto* const more = reinterpret_cast<float*>(mine + places_.more);
  auto* const turned = reinterpret_cast<float*>(mine + places_.turned);
  auto* const y = reinterpret_cast<float*>(mine + places_.y);  // [tokens, kChunk]
  std::fill_n(y, int64_t{tokens} * kChunk, 0.0f);
  for (int g = 0; g < static_cast<int>(routing_.groups.size()); ++g) {
    const ExpertGroup& group = routing_.groups[g];
    const Product& both = parts_[g].gate_up;
    list_.wait(item, kSums, g);
    transpose_gate_up(group, item.begin, mine + places_.panel);
    const LowRank& f = args_.lora.gate_up;
    if (gate_up_.rank)
      turn({.from = f.a + int64_t{group.expert} * f.rank * shape_.hidden + item.begin,
            .k_step = shape_.hidden,
            .lane_step = 1,
            .k = f.rank,
            .lanes = item.count,
            .blocks = kPanelBlocks,
            .out = turned,
            .out_stride = int64_t{f.rank} * kBlockRows});
    for (int first = 0; first < group.m; first += kRows) {
      const Rows rows{group, first, std::min(kRows, group.m - first)};
      both.plan.multiply({.packing = &plain_gate_up_,
                          .blocks = mine + places_.panel,
                          .count = kPanelBlocks,
                          .acts = rows_of(both.acts, first, rows.count, group.m),
                          .m = rows.count,
                          .out = tile,
                          .ld = kChunk,
                          .scratch = mine + places_.multiply});
      if (gate_up_.rank) {
        gram_kernels(kernels_).product_f32({.a = gate_up_.sums + rows.at() * gate_up_.width,
                                            .a_stride = gate_up_.width,
                                            .m = rows.count,
                                            .k = f.rank,
                                            .b = turned,
                                            .b_stride = int64_t{f.rank} * kBlockRows,
                                            .blocks = kPanelBlocks,
                                            .out = more,
                                            .out_stride = kChunk});
        kernels_.add_scaled(tile, more, 1.0f, rows.count * kChunk);
      }
      for (int i = 0; i < rows.count; ++i)
        kernels_.add_scaled(y + int64_t{routing_.token[rows.at() + i]} * kChunk, tile + int64_t{i} * kChunk,
                            1.0f, kChunk);
    }
  }
  float* const out = direct_ ? args_.input_grad : input_;
  for (int t = 0; t < tokens; ++t)
    std::memcpy(out + int64_t{t} * shape_.hidden + item.begin, y + int64_t{t} * kChunk,
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
