// The MoE forward, written once: group rows by expert -> quantise each expert's rows -> gate|up for a slice
// of rows and the activation while both are in cache -> quantise again -> down for a slice of columns, added
// up over the experts.
//
// On each node the work is a list of items that workers claim in order. No barrier: an item waits for what it
// needs, and what it needs was claimed before it, so somebody is at work on it.
//   tokens    (rows)            with many tokens: quantise each once
//   pack      (group, rows)     input rows of a group, quantised, in the kernels' order
//   gate_up   (group, pairs)    after the group's pack items
//   requant   (group, rows)     after the group's gate_up items
//   down      (columns)         over all groups in order, each after its requant items
// Down items own their output columns and add experts in order, so the result does not depend on who did
// what.
#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "base/error.h"
#include "base/signal.h"
#include "nn/experts_state.h"
#include "nn/reserve.h"

namespace kt {
namespace {

constexpr int kPackRows = 32;      // rows of a pack or requant item
constexpr int kSharedTokens = 32;  // from here on tokens are quantised once and copied to their experts
constexpr size_t kItemBytes =
    128 << 10;  // weights of a decode item: long enough to stream, 15 us of a core's share
constexpr int kTileBytes = 256 << 10;         // sums of a prefill item
constexpr size_t kAheadBytes = 16 << 10;      // of weights, fetched while an item waits
constexpr size_t kRowsAheadBytes = 64 << 10;  // of the next group's rows, fetched during a multiplication

enum class Stage : uint8_t { kTokens, kPack, kGateUp, kRequant, kDown };
struct Item {
  Stage stage;
  int group;
  int begin, count;
};

struct Group {
  int expert = 0, m = 0;
  int first = 0;  // into Routing::token and Routing::weight
};

// Which rows go to which expert; the same on all nodes.
struct Routing {
  std::vector<Group> groups;       // in expert order
  std::vector<int32_t> token;      // [rows], by group
  std::vector<float> weight;       // [rows]
  std::vector<int32_t> count, at;  // scratch, [experts]
};

struct Stages {
  Countdown pack_left{1}, gate_up_left{1}, requant_left{1};
  Signal packed, activated, ready;
};

// A group on one node: plans and places in the node's memory.
struct Part {
  Plan in, down;
  Acts in_acts, mid_acts;
  float* mid = nullptr;  // [m, 16 * blocks]
};

struct alignas(64) NodeWork {
  std::atomic<int> next{0};
  std::vector<Item> items;
  std::vector<Part> parts;
  std::unique_ptr<Stages[]> stages;
  Acts tokens;  // [tokens]: all input rows quantised once, in plain order; codes null where groups do it
                // themselves
  Countdown tokens_left{1};
  Signal tokens_ready;
  size_t stage_capacity = 0;
  Buffer memory;
  std::byte* worker_memory = nullptr;
  size_t worker_bytes = 0, multiply_bytes = 0, tile_bytes = 0;
  float* partial = nullptr;  // [tokens, hidden], with more than one node
};

struct Bump {
  size_t at = 0;
  size_t take(size_t bytes) {
    const size_t here = at;
    at += round_up(bytes, size_t{64});
    return here;
  }
};

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

}  // namespace

struct Workspace::State {
  std::mutex mutex;
  Routing routing;
  std::vector<std::unique_ptr<NodeWork>> nodes;
};

Workspace::Workspace() : state_(std::make_unique<State>()) {}
Workspace::~Workspace() = default;
size_t Workspace::bytes() const {
  std::lock_guard lock(state_->mutex);
  size_t sum = 0;
  for (const auto& node : state_->nodes) sum += node->memory.size();
  return sum;
}

namespace {

template <class T>
void check_pointer(const T* p, size_t alignment, const char* name) {
  if (!p) fail("forward: {} is null", name);
  if (reinterpret_cast<uintptr_t>(p) % alignment)
    fail("forward: {} is not aligned to {} bytes", name, alignment);
}

size_t size_of(Real type) { return type == Real::kF32 ? 4 : 2; }

void check(const ExpertsShape& shape, const ExpertsOptions& options, const ForwardArgs& a) {
  if (a.tokens < 0 || a.tokens > options.max_tokens)
    fail("forward: {} tokens, expected 0 to {} (max_tokens)", a.tokens, options.max_tokens);
  if (a.top_k < 1) fail("forward: top_k is {}, expected at least 1", a.top_k);
  if (a.tokens == 0) return;
  if (!a.ids == !a.ids64) fail("forward: exactly one of ids and ids64 is needed");
  check_pointer(a.input, size_of(a.input_type), "input");
  check_pointer(a.output, size_of(a.output_type), "output");
  check_pointer(a.weights, 4, "weights");
  if (a.ids) check_pointer(a.ids, 4, "ids");
  if (a.ids64) check_pointer(a.ids64, 8, "ids64");
  if (a.input_stride && a.input_stride < shape.hidden)
    fail("forward: input stride {} is below hidden {}", a.input_stride, shape.hidden);
  if (a.output_stride && a.output_stride < shape.hidden)
    fail("forward: output stride {} is below hidden {}", a.output_stride, shape.hidden);
}

void route(const ExpertsShape& shape, const std::vector<uint8_t>& loaded, const ForwardArgs& a, Routing& r) {
  const int64_t slots = int64_t{a.tokens} * a.top_k;
  const auto expert_of = [&](int64_t i) -> int {
    const int64_t id = a.ids ? a.ids[i] : a.ids64[i];
    return id < 0 || id >= shape.experts || (a.skip && a.skip[id]) ? -1 : static_cast<int>(id);
  };
  r.count.assign(shape.experts, 0);
  for (int64_t i = 0; i < slots; ++i)
    if (const int e = expert_of(i); e >= 0) ++r.count[e];
  r.groups.clear();
  r.at.resize(shape.experts);
  int rows = 0;
  for (int e = 0; e < shape.experts; ++e) {
    r.at[e] = rows;
    if (!r.count[e]) continue;
    if (!loaded[e]) fail("forward: a token is routed to expert {}, which is not loaded", e);
    r.groups.push_back({e, r.count[e], rows});
    rows += r.count[e];
  }
  r.token.resize(rows);
  r.weight.resize(rows);
  for (int64_t i = 0; i < slots; ++i)
    if (const int e = expert_of(i); e >= 0) {
      const int row = r.at[e]++;
      r.token[row] = static_cast<int32_t>(i / a.top_k);
      r.weight[row] = a.weights[i];
    }
}

// Everything one node needs for one call. Built by the calling thread, run by the node's workers.
class NodeJob {
 public:
  struct Setting {
    const Kernels* kernels;
    const ExpertsShape* shape;
    const ExpertsOptions* options;
    const Shard* shard;
    const std::vector<float>* down_bias;  // null on all nodes but the first
    const ForwardArgs* args;
    const Routing* routing;
    NodeWork* work;
    int memory_node;
    bool direct;  // output is written here; otherwise to work.partial
  };
  explicit NodeJob(const Setting& s)
      : kernels_(*s.kernels),
        shape_(*s.shape),
        options_(*s.options),
        shard_(*s.shard),
        args_(*s.args),
        routing_(*s.routing),
        work_(*s.work),
        down_bias_(s.down_bias),
        memory_node_(s.memory_node),
        direct_(s.direct) {}

  const float* partial() const { return work_.partial; }

  // Lists the items and lays out memory; returns its bytes.
  size_t lay_out(int workers) {
    const size_t groups = routing_.groups.size();
    work_.parts.resize(groups);
    if (work_.stage_capacity < groups) {
      work_.stages = std::make_unique<Stages[]>(groups);
      work_.stage_capacity = groups;
    }
    size_t most_rows = 0, multiply = 0, down_bytes = 0;
    bool panels = false;
    Bump bump;
    std::vector<size_t>& at = places_;
    at.clear();
    for (size_t g = 0; g < groups; ++g) {
      const int m = routing_.groups[g].m;
      Part& part = work_.parts[g];
      const bool same = g > 0 && routing_.groups[g - 1].m == m;
      part.in = same ? work_.parts[g - 1].in : plan_for(kernels_, shard_.gate_up, options_.precision, m);
      part.down = same ? work_.parts[g - 1].down : plan_for(kernels_, shard_.down, options_.precision, m);
      at.push_back(bump.take(act_bytes(part.in.acts)));
      at.push_back(bump.take(act_bytes(part.down.acts)));
      at.push_back(bump.take(static_cast<size_t>(m) * mid_ld() * sizeof(float)));
      most_rows = std::max<size_t>(most_rows, m);
      multiply = std::max({multiply, part.in.scratch_bytes, part.down.scratch_bytes});
      down_bytes += shard_.down.block_bytes;
      panels |= part.down.scratch_bytes > 0;
    }
    down_blocks_ = item_blocks(panels ? kernels_.panel_blocks : 0, shard_.down.blocks, down_bytes, workers);
    list_items(workers);
    work_.multiply_bytes = round_up(multiply, size_t{64});
    work_.tile_bytes = round_up(most_rows * (widest_ + 1) * kBlockRows * sizeof(float), size_t{64});
    const size_t y_bytes = static_cast<size_t>(args_.tokens) * down_blocks_ * kBlockRows * sizeof(float);
    work_.worker_bytes = round_up(work_.multiply_bytes + work_.tile_bytes + y_bytes, size_t{4096}) + 4096;
    const size_t partial_bytes =
        direct_ ? 0 : static_cast<size_t>(args_.tokens) * shape_.hidden * sizeof(float);
    const ActShape shared = shared_shape();
    shared_at_ = bump.take(shared.rows ? act_bytes(shared) : 0);
    partial_at_ = bump.take(partial_bytes);
    workers_at_ = bump.take(work_.worker_bytes * workers);
    return bump.at;
  }

  // Everything ready for the workers.
  void plan(int workers) {
    const size_t bytes = lay_out(workers);
    grow(work_.memory, bytes, {.node = memory_node_});
    std::byte* base = work_.memory.data();
    const std::vector<size_t>& at = places_;
    for (size_t g = 0; g < routing_.groups.size(); ++g) {
      Part& part = work_.parts[g];
      part.in_acts = acts_in(part.in.acts, base + at[3 * g]);
      part.mid_acts = acts_in(part.down.acts, base + at[3 * g + 1]);
      part.mid = reinterpret_cast<float*>(base + at[3 * g + 2]);
    }
    const ActShape shared = shared_shape();
    work_.tokens = shared.rows ? acts_in(shared, base + shared_at_) : Acts{};
    work_.partial = direct_ ? nullptr : reinterpret_cast<float*>(base + partial_at_);
    work_.worker_memory = base + workers_at_;
    work_.next.store(0, std::memory_order_relaxed);
  }

  void run(int rank) noexcept {
    std::byte* mine = work_.worker_memory + rank * work_.worker_bytes;
    for (;;) {
      const int i = work_.next.fetch_add(1, std::memory_order_relaxed);
      if (i >= static_cast<int>(work_.items.size())) return;
      const Item& item = work_.items[i];
      switch (item.stage) {
        case Stage::kTokens:
          pack_tokens(item);
          break;
        case Stage::kPack:
          pack(item);
          break;
        case Stage::kGateUp:
          gate_up(item, mine);
          break;
        case Stage::kRequant:
          requant(item);
          break;
        case Stage::kDown:
          down(item, mine);
          break;
      }
    }
  }

 private:
  const Kernels& kernels_;
  const ExpertsShape& shape_;
  const ExpertsOptions& options_;
  const Shard& shard_;
  const ForwardArgs& args_;
  const Routing& routing_;
  NodeWork& work_;
  const std::vector<float>* down_bias_;
  int memory_node_;
  bool direct_;
  int down_blocks_ = 1;
  size_t widest_ = 1;           // row blocks of the widest multiply
  std::vector<size_t> places_;  // of each group's parts
  size_t shared_at_ = 0, partial_at_ = 0, workers_at_ = 0;

  const std::byte* down_blocks(int expert, int begin) const {
    return shard_.expert(expert) + shard_.gate_up_bytes + begin * shard_.down.block_bytes;
  }
  int64_t input_stride() const { return args_.input_stride ? args_.input_stride : shape_.hidden; }
  int64_t mid_ld() const { return shard_.gate_up.blocks * kBlockRows; }

  void list_items(int workers) {
    work_.items.clear();
    if (shared_shape().rows) {
      work_.tokens_ready.reset();
      work_.tokens_left.reset(ceil_div(args_.tokens, kPackRows));
      for (int t = 0; t < args_.tokens; t += kPackRows)
        work_.items.push_back({Stage::kTokens, 0, t, std::min(kPackRows, args_.tokens - t)});
    }
    const int groups = static_cast<int>(routing_.groups.size());
    const auto row_items = [&](Stage stage, int g) {
      const int m = routing_.groups[g].m;
      for (int r = 0; r < m; r += kPackRows) work_.items.push_back({stage, g, r, std::min(kPackRows, m - r)});
      return static_cast<int>(ceil_div(m, kPackRows));
    };
    for (int g = 0; g < groups; ++g) {
      Stages& s = work_.stages[g];
      s.packed.reset();
      s.activated.reset();
      s.ready.reset();
      s.pack_left.reset(row_items(Stage::kPack, g));
    }
    widest_ = down_blocks_;
    for (int g = 0; g < groups; ++g) {
      const bool panels = work_.parts[g].in.scratch_bytes > 0;
      // A worker that meets a group reads its rows from other cores' caches: the more row blocks it then
      // does, the better, while the sums stay in its own.
      const int panel_blocks =
          panels ? std::max<int>(kernels_.panel_blocks, kTileBytes / (kBlockRows * 4 * routing_.groups[g].m))
                 : 0;
      const int pairs = std::max(1, item_blocks(panel_blocks, 2 * groups * shard_.gate_up.blocks,
                                                shard_.gate_up.block_bytes, workers) /
                                        2);
      widest_ = std::max<size_t>(widest_, 2 * pairs);
      const int blocks = static_cast<int>(shard_.gate_up.blocks);
      for (int b = 0; b < blocks; b += pairs)
        work_.items.push_back({Stage::kGateUp, g, b, std::min(pairs, blocks - b)});
      work_.stages[g].gate_up_left.reset(ceil_div(blocks, pairs));
    }
    for (int g = 0; g < groups; ++g) work_.stages[g].requant_left.reset(row_items(Stage::kRequant, g));
    const int blocks = static_cast<int>(shard_.down.blocks);
    // The last quarter in halves: with two items a worker, the slowest was 10 to 15 % behind the mean.
    const int tail = down_blocks_ >= 4 ? down_blocks_ / 4 * 2 : down_blocks_;
    for (int b = 0, size = 0; b < blocks; b += size) {
      size = std::min(blocks - b > blocks / 4 ? down_blocks_ : tail, blocks - b);
      work_.items.push_back({Stage::kDown, 0, b, size});
    }
  }

  // Row blocks of one item, out of `all` of the stage: as many as stream well (few rows; panel_blocks is 0)
  // or up to panel_blocks (many rows), as long as every worker gets a few items.
  int item_blocks(int panel_blocks, int64_t all, size_t block_bytes, int workers) const {
    const int64_t most =
        panel_blocks ? panel_blocks : std::clamp<int64_t>(kItemBytes / block_bytes, 1, kernels_.panel_blocks);
    const int64_t least = panel_blocks ? 2 : 1, items_each = panel_blocks ? 2 : 4;
    const int64_t blocks = std::clamp<int64_t>(all / (items_each * workers), least, std::max(most, least));
    return static_cast<int>(blocks > 1 ? blocks - blocks % 2 : blocks);
  }

  // Packed rows of an item: the last one of a group brings the padding rows along.
  static int rows_with_padding(const Item& item, int m, const ActShape& shape_) {
    return item.begin + item.count == m ? shape_.rows - item.begin : item.count;
  }

  // Plain order for all tokens when every group wants the same codes and there are enough of them; else no
  // rows.
  ActShape shared_shape() const {
    ActShape s = work_.parts[0].in.acts;
    bool same = s.code == ActCode::kS8 && args_.tokens >= kSharedTokens &&
                routing_.token.size() >= 2 * static_cast<size_t>(args_.tokens);
    for (const Part& part : work_.parts)
      same = same && part.in.acts.scale_span == s.scale_span && part.in.acts.sum_span == s.sum_span;
    s.rows = same ? args_.tokens : 0;
    s.side = 1;
    return s;
  }

  void pack_tokens(const Item& item) noexcept {
    const auto* from =
        static_cast<const std::byte*>(args_.input) + item.begin * input_stride() * size_of(args_.input_type);
    kernels_.pack_acts({.source = from,
                        .type = args_.input_type,
                        .stride = input_stride(),
                        .m = item.count,
                        .k = shape_.hidden,
                        .out = rows_from(work_.tokens, item.begin, item.count)});
    if (work_.tokens_left.arrive()) work_.tokens_ready.set();
  }

  void pack(const Item& item) noexcept {
    const Group& group = routing_.groups[item.group];
    const Part& part = work_.parts[item.group];
    const int32_t* index = routing_.token.data() + group.first + item.begin;
    const Acts out =
        rows_from(part.in_acts, item.begin, rows_with_padding(item, group.m, part.in_acts.shape));
    if (work_.tokens.codes) {
      work_.tokens_ready.wait();
      kernels_.copy_acts({.from = work_.tokens, .index = index, .m = item.count, .out = out});
    } else {
      kernels_.pack_acts({.source = args_.input,
                          .type = args_.input_type,
                          .stride = input_stride(),
                          .index = index,
                          .m = item.count,
                          .k = shape_.hidden,
                          .out = out});
    }
    if (work_.stages[item.group].pack_left.arrive()) work_.stages[item.group].packed.set();
  }

  void gate_up(const Item& item, std::byte* mine) noexcept {
    const Group& group = routing_.groups[item.group];
    const Part& part = work_.parts[item.group];
    Stages& stages = work_.stages[item.group];
    const std::byte* blocks = shard_.expert(group.expert) + item.begin * shard_.pair_bytes;
    if (!stages.packed.is_set()) {
      prefetch(blocks, item.count * shard_.pair_bytes, kAheadBytes);
      stages.packed.wait();
    }
    auto* tile = reinterpret_cast<float*>(mine + work_.multiply_bytes);
    // A block more than needed: rows a multiple of 4 KiB apart would all fall into the same sets of the
    // caches.
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
    if (stages.gate_up_left.arrive()) stages.activated.set();
  }

  void requant(const Item& item) noexcept {
    const Group& group = routing_.groups[item.group];
    const Part& part = work_.parts[item.group];
    Stages& stages = work_.stages[item.group];
    stages.activated.wait();
    kernels_.pack_acts(
        {.source = part.mid + item.begin * mid_ld(),
         .type = Real::kF32,
         .stride = mid_ld(),
         .m = item.count,
         .k = shard_.end - shard_.begin,
         .out = rows_from(part.mid_acts, item.begin, rows_with_padding(item, group.m, part.mid_acts.shape))});
    if (stages.requant_left.arrive()) stages.ready.set();
  }

  void down(const Item& item, std::byte* mine) noexcept {
    const int columns = item.count * kBlockRows, first = item.begin * kBlockRows;
    auto* tile = reinterpret_cast<float*>(mine + work_.multiply_bytes);
    auto* y = reinterpret_cast<float*>(mine + work_.multiply_bytes + work_.tile_bytes);  // [tokens, columns]
    std::memset(y, 0, static_cast<size_t>(args_.tokens) * columns * sizeof(float));
    for (size_t g = 0; g < routing_.groups.size(); ++g) {
      const Group& group = routing_.groups[g];
      const Part& part = work_.parts[g];
      const bool panels = part.down.scratch_bytes > 0;
      const std::byte* blocks = down_blocks(group.expert, item.begin);
      if (!work_.stages[g].ready.is_set()) {
        prefetch(blocks, item.count * shard_.down.block_bytes, kAheadBytes);
        work_.stages[g].ready.wait();
      }
      const std::byte* after = nullptr;
      if (g + 1 < routing_.groups.size()) {
        after = down_blocks(routing_.groups[g + 1].expert, item.begin);
        // the next group's rows come from other cores' caches: have them on their way while this one is
        // multiplied
        const Acts& next = work_.parts[g + 1].mid_acts;
        if (panels && work_.stages[g + 1].ready.is_set())
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
      const float* bias = down_bias_ && !down_bias_->empty()
                              ? down_bias_->data() + int64_t{group.expert} * shape_.hidden + first
                              : nullptr;
      const int real = std::min(columns, shape_.hidden - first);
      for (int i = 0; i < group.m; ++i) {
        float* to = y + int64_t{routing_.token[group.first + i]} * columns;
        const float weight = routing_.weight[group.first + i];
        kernels_.add_scaled(to, tile + int64_t{i} * columns, weight, columns);
        if (bias) kernels_.add_scaled(to, bias, weight, real);
      }
    }
    const int real = std::min(columns, shape_.hidden - first);
    for (int t = 0; t < args_.tokens; ++t) {
      const float* from = y + int64_t{t} * columns;
      if (direct_)
        store_output(t, first, from, real);
      else
        std::memcpy(work_.partial + int64_t{t} * shape_.hidden + first, from, real * sizeof(float));
    }
  }

  void store_output(int token, int column, const float* from, int n) const noexcept {
    const int64_t stride = args_.output_stride ? args_.output_stride : shape_.hidden;
    kernels_.store(
        static_cast<std::byte*>(args_.output) + (token * stride + column) * size_of(args_.output_type),
        args_.output_type, from, n);
  }
};

bool on_one_node(const std::vector<Shard>& shards) {
  return std::count_if(shards.begin(), shards.end(), [](const Shard& s) { return s.begin < s.end; }) == 1;
}

// Rows spread evenly: the first experts get one more where they do not divide.
Routing even_routing(int experts, int tokens, int top_k) {
  Routing routing;
  const int rows = tokens * top_k, hit = std::min(experts, rows);
  for (int e = 0, first = 0; e < hit; ++e) {
    const int m = rows / hit + (e < rows % hit ? 1 : 0);
    routing.groups.push_back({.expert = e, .m = m, .first = first});
    first += m;
  }
  routing.token.resize(static_cast<size_t>(rows));
  return routing;
}

void store_zeros(const ExpertsShape& shape, const ForwardArgs& a) {
  const int64_t stride = a.output_stride ? a.output_stride : shape.hidden;
  for (int t = 0; t < a.tokens; ++t)
    std::memset(static_cast<std::byte*>(a.output) + t * stride * size_of(a.output_type), 0,
                shape.hidden * size_of(a.output_type));
}

}  // namespace

size_t Experts::forward_bytes(int tokens, int top_k) const {
  const State& s = *state_;
  const Routing routing = even_routing(s.shape.experts, tokens, top_k);
  const ForwardArgs args{.tokens = tokens, .top_k = top_k};
  if (routing.groups.empty()) return 0;
  size_t bytes = 0;
  for (int n = 0; n < s.pool->nodes(); ++n) {
    if (s.shards[n].begin == s.shards[n].end) continue;
    NodeWork work;
    NodeJob job({.kernels = s.kernels,
                 .shape = &s.shape,
                 .options = &s.options,
                 .shard = &s.shards[n],
                 .down_bias = nullptr,
                 .args = &args,
                 .routing = &routing,
                 .work = &work,
                 .memory_node = -1,
                 .direct = on_one_node(s.shards)});
    bytes += with_reserve(job.lay_out(s.pool->threads(n)));
  }
  return bytes;
}

void Experts::forward(const ForwardArgs& args) const {
  const State& s = *state_;
  KT_CHECK(!s.options.sizes_only, "experts without memory");
  check(s.shape, s.options, args);
  if (args.tokens == 0) return;
  Workspace::State& space = *s.workspace->state_;
  std::lock_guard lock(space.mutex);
  route(s.shape, s.is_loaded, args, space.routing);
  if (space.routing.groups.empty()) return store_zeros(s.shape, args);

  const int nodes = s.pool->nodes();
  while (static_cast<int>(space.nodes.size()) < nodes) space.nodes.push_back(std::make_unique<NodeWork>());
  std::vector<NodeJob> jobs;  // of nodes that have a shard
  std::vector<int> job_of(nodes, -1);
  const bool direct = on_one_node(s.shards);
  for (int n = 0; n < nodes; ++n) {
    if (s.shards[n].begin == s.shards[n].end) continue;
    job_of[n] = static_cast<int>(jobs.size());
    jobs.emplace_back(NodeJob::Setting{.kernels = s.kernels,
                                       .shape = &s.shape,
                                       .options = &s.options,
                                       .shard = &s.shards[n],
                                       .down_bias = jobs.empty() ? &s.down_bias : nullptr,
                                       .args = &args,
                                       .routing = &space.routing,
                                       .work = space.nodes[n].get(),
                                       .memory_node = s.pool->memory_node(n),
                                       .direct = direct});
    jobs.back().plan(s.pool->threads(n));
  }

  s.pool->run([&](const Worker& w) {
    if (job_of[w.node] >= 0) jobs[job_of[w.node]].run(w.rank);
  });
  if (direct) return;
  // Sum of the nodes' partial outputs, in node order.
  s.pool->run([&](const Worker& w) {
    const int all = s.pool->threads();
    std::vector<float> sum(s.shape.hidden);
    for (int t = w.index; t < args.tokens; t += all) {
      const auto part = [&](const NodeJob& job) { return job.partial() + int64_t{t} * s.shape.hidden; };
      std::copy_n(part(jobs[0]), s.shape.hidden, sum.begin());
      for (size_t j = 1; j < jobs.size(); ++j)
        s.kernels->add_scaled(sum.data(), part(jobs[j]), 1.0f, s.shape.hidden);
      const int64_t stride = args.output_stride ? args.output_stride : s.shape.hidden;
      s.kernels->store(static_cast<std::byte*>(args.output) + t * stride * size_of(args.output_type),
                       args.output_type, sum.data(), s.shape.hidden);
    }
  });
}

}  // namespace kt
