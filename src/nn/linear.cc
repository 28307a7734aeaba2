#include "nn/linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#include "base/checked.h"
#include "base/error.h"
#include "base/signal.h"
#include "nn/reserve.h"

namespace kt::inline nn {
namespace {

constexpr int kPackRows = 32;             // rows of one packing item
constexpr int kPackNumbers = 1024;        // of an item of few rows, which is some of their columns
constexpr int kFirstItems = 2;            // of a worker that streams: they are known before it comes to them
constexpr size_t kItemBytes = 128 << 10;  // weights of an item when there are few rows: long enough to stream
constexpr size_t kRowBytes = 1 << 20;     // packed rows of an item when there are many: half of an L2
constexpr int kStreamRows = 8;            // as many at most: weights take longer to read than to multiply
constexpr int kLeastRows =
    64;  // of such an item: widening a weight takes as long as its product with as many

// Rows of x in the kernels' order, for all calls that want the same.
struct Rows {
  const float* x = nullptr;
  int64_t stride = 0;
  int k = 0;
  ActShape shape;
  bool plain = false;  // x as it lies
  Acts acts;
  size_t at = 0;  // in the shared memory
};

// What one worker packs of rows[of]: some of the rows, or of few rows some of the columns.
struct PackItem {
  int of, begin, end;
};

// Columns of such an item. Several workers that pack a row each would write to one another's cache lines, because the
// scales of rows stand side by side.
int pack_columns(const ActShape& shape, int m) {
  const int unit = std::lcm(kChunk, std::lcm(shape.scale_span, shape.sum_span));
  return static_cast<int>(round_up(std::max(1, kPackNumbers / m), unit));
}

struct Item {
  int call, begin, count;  // row blocks [begin, begin + count) of the node's slice
  int first, rows;         // of x
};

// How a product of many rows is cut: rows of x and row blocks of the matrix of one item.
struct ItemShape {
  int rows;
  int64_t blocks;
};

// Rows stay in a worker's L2 while it multiplies them by block after block, and are the same for all items it takes
// unless it helps another; blocks in whole panels, four items a worker, because some workers are slower than others.
// f32 products need no panels: as many items as give each worker two, which a router's few rows hardly do.
ItemShape item_shape(const Kernels& kernels, const ActShape& acts, int m, int64_t blocks, int workers) {
  const int64_t row_bytes = int64_t{acts.k_pad} * bytes_of(acts.code);
  const int64_t most =
      std::clamp<int64_t>(static_cast<int64_t>(kRowBytes) / row_bytes, kLeastRows, kManyRows);
  const int64_t pieces = ceil_div(m, most), rows = round_up(ceil_div(m, pieces), 2 * kBlockRows);
  const int64_t share = std::min<int64_t>(ceil_div(m, rows) * blocks / (4 * workers), kernels.panel_blocks);
  const int64_t width = kernels.panel_width;
  if (acts.code == ActCode::kF32) {
    const int64_t each =
        std::clamp<int64_t>(ceil_div(m, rows) * blocks / (2 * workers), 1, kernels.panel_blocks);
    return {.rows = static_cast<int>(rows), .blocks = each > 1 ? each - each % 2 : 1};
  }
  return {.rows = static_cast<int>(rows), .blocks = std::max(share / width * width, std::min(width, blocks))};
}

}  // namespace

Linear::Linear(const Pool& pool, const MatrixView& weights, std::span<const float> bias,
               LinearOptions options, std::string_view name)
    : n_(weights.n),
      k_(weights.k),
      format_(weights.format),
      options_(options),
      bias_(bias.begin(), bias.end()) {
  lay_out(pool, name);
  if (!options_.sizes_only) pack(0, weights);
}

Linear::Linear(Pool& pool, const RowReader& weights, std::span<const float> bias, LinearOptions options,
               std::string_view name)
    : n_(weights.n),
      k_(weights.k),
      format_(weights.format),
      options_(options),
      bias_(bias.begin(), bias.end()) {
  lay_out(pool, name);
  if (options_.sizes_only) return;
  for_pieces(pool, weights, [&](int64_t first, const MatrixView& piece) { pack(first, piece); });
}

std::vector<Linear::Run> Linear::runs() const {
  std::vector<Run> out;
  for (const Slice& slice : slices_)
    if (slice.packing.blocks > 0) out.push_back({slice.first_block, slice.memory.bytes()});
  return out;
}

Packing Linear::packing() const {
  return packing_for(format_, n_, k_, options_.kernels->fragment, "a linear");
}

// Which rows each node has, and memory for them.
void Linear::lay_out(const Pool& pool, std::string_view name) {
  if (!options_.kernels) options_.kernels = &best_kernels();
  if (!bias_.empty() && static_cast<int64_t>(bias_.size()) != n_)
    fail("{}: expected {} biases, got {}", name, n_, bias_.size());
  const Fragment& fragment = options_.kernels->fragment;
  const int64_t unit =
      std::max<int64_t>(1, format_.span.n / kBlockRows);  // blocks that share scales stay together
  const int64_t units = ceil_div(ceil_div(n_, kBlockRows), unit);
  for (int node = 0; node < pool.nodes(); ++node) {
    Slice slice;
    const int64_t begin = units * node / pool.nodes() * unit,
                  end = std::min(units * (node + 1) / pool.nodes() * unit, ceil_div(n_, kBlockRows));
    slice.first_block = begin;
    if (begin < end) {
      // Packed as rows of the whole matrix: blocks of scales that reach over a slice's border keep their
      // place.
      slice.packing = packing_for(format_, n_, k_, fragment, name);
      slice.packing.blocks = end - begin;
      const size_t bytes =
          checked_mul(slice.packing.block_bytes, static_cast<size_t>(slice.packing.blocks), name);
      if (!options_.sizes_only)
        slice.memory = Buffer(bytes, {.node = pool.memory_node(node), .huge = options_.huge});
    }
    slices_.push_back(std::move(slice));
  }
}

// Rows [first, first + piece.n), which begin with a row block.
void Linear::pack(int64_t first, const MatrixView& piece) {
  const int64_t first_block = first / kBlockRows, blocks = ceil_div(piece.n, kBlockRows);
  for (Slice& slice : slices_) {
    Packing packing = slice.packing;
    packing.n = piece.n;
    packing.blocks = blocks;
    const int64_t begin = std::max(first_block, slice.first_block),
                  end = std::min(first_block + blocks, slice.first_block + slice.packing.blocks);
    for (int64_t b = begin; b < end; ++b)
      pack_block(packing, piece, 0, b - first_block,
                 slice.memory.data() + static_cast<size_t>(b - slice.first_block) * packing.block_bytes);
  }
}

size_t Linear::packed_bytes(int node) const {
  return empty() ? 0 : slices_[static_cast<size_t>(node)].packing.bytes();
}

size_t Linear::packed_bytes() const {
  size_t bytes = 0;
  for (const Slice& slice : slices_) bytes += slice.packing.bytes();
  return bytes;
}

double Linear::stored_bytes() const {
  return static_cast<double>(n_) * static_cast<double>(k_) / 8 * stored_bits(format_, n_, k_);
}

struct LinearWork::State {
  // Items [next, end) of a node, which workers take one after another.
  struct alignas(64) Share {
    std::atomic<int> next{0};
    int end = 0;
  };
  struct alignas(64) Node {
    std::vector<Item> items;
    // [1]: worker r begins with items r and r + workers and then claims the next; or [workers] of the node: who has
    // done its own helps the others.
    std::vector<Share> shares;
    bool streams = false;  // few rows: items are read, rather than multiplied
    Buffer memory;         // of its workers
    size_t worker_bytes = 0, bytes = 0;
  };
  std::shared_ptr<Pool> pool;
  std::vector<std::unique_ptr<Node>> nodes;
  std::vector<Plan> plans;   // [calls]
  std::vector<int> rows_of;  // [calls] into rows
  std::vector<Rows> rows;
  std::vector<PackItem> packs;
  size_t rows_bytes = 0;
  Buffer shared;  // packed rows
  std::atomic<int> next_pack{0};
  Countdown packs_left{1};
  Signal packed;
  int m = 0;
  std::span<const LinearCall> calls;

  void plan();
  void list_items();
  void share_items(Node& node, int shares, int workers);
  void allocate();
  void pack(int item) noexcept;
  void multiply(const Item& item, int node, std::byte* mine) noexcept;
  void work(const Worker& worker) noexcept;
};

// Which rows are quantised how, and where they go.
void LinearWork::State::plan() {
  plans.clear();
  rows.clear();
  rows_of.clear();
  for (const LinearCall& call : calls) {
    const auto* slice = &call.linear->slices_.front();
    for (const auto& s : call.linear->slices_)
      if (s.packing.blocks) slice = &s;
    plans.push_back(
        plan_for(*call.linear->options_.kernels, slice->packing, call.linear->options_.precision, m));
    const ActShape& shape = plans.back().acts;
    auto at = std::find_if(rows.begin(), rows.end(), [&](const Rows& r) {
      return r.x == call.x && r.stride == call.x_stride && r.k == call.linear->k() && r.shape == shape;
    });
    rows_of.push_back(static_cast<int>(at - rows.begin()));
    const int k = call.linear->k();
    if (at == rows.end())
      rows.push_back(
          {.x = call.x,
           .stride = call.x_stride,
           .k = k,
           .shape = shape,
           .plain = plans.back().route == Route::kManyF32 && k == shape.k_pad && k == call.x_stride,
           .acts = {}});
  }
  rows_bytes = 0;
  packs.clear();
  for (Rows& r : rows) {
    if (r.plain) continue;
    const int all = r.shape.beside ? r.shape.k_pad : m,
              each = r.shape.beside ? pack_columns(r.shape, m) : kPackRows;
    for (int begin = 0; begin < all; begin += each)
      packs.push_back({static_cast<int>(&r - rows.data()), begin, std::min(all, begin + each)});
    r.at = rows_bytes;
    rows_bytes += round_up(act_bytes(r.shape), size_t{64});
  }
  next_pack.store(0, std::memory_order_relaxed);
  packed.reset();
  if (packs.empty())
    packed.set();
  else
    packs_left.reset(static_cast<int>(packs.size()));
}

void LinearWork::State::list_items() {
  for (int n = 0; n < pool->nodes(); ++n) {
    Node& node = *nodes[static_cast<size_t>(n)];
    node.items.clear();
    size_t scratch = 0, tile = 0;
    bool many = false;
    const int workers = pool->threads(n);
    for (size_t c = 0; c < calls.size(); ++c) {
      const Linear::Slice& slice = calls[c].linear->slices_[static_cast<size_t>(n)];
      if (!slice.packing.blocks) continue;
      const Kernels& kernels = *calls[c].linear->options_.kernels;
      const bool panels = plans[c].scratch_bytes > 0;
      ItemShape shape{.rows = m, .blocks = 1};
      many |= panels && m > kStreamRows;
      if (panels) {
        shape = item_shape(kernels, plans[c].acts, m, slice.packing.blocks, workers);
      } else {
        const auto most = static_cast<int64_t>(kItemBytes / slice.packing.block_bytes);
        shape.blocks = std::clamp<int64_t>(slice.packing.blocks / (4 * workers), 1,
                                           std::clamp<int64_t>(most, 1, kernels.panel_blocks));
        if (shape.blocks > 1) shape.blocks -= shape.blocks % 2;
      }
      for (int first = 0; first < m; first += shape.rows)
        for (int64_t b = 0; b < slice.packing.blocks; b += shape.blocks)
          node.items.push_back({.call = static_cast<int>(c),
                                .begin = static_cast<int>(b),
                                .count = static_cast<int>(std::min(shape.blocks, slice.packing.blocks - b)),
                                .first = first,
                                .rows = std::min(shape.rows, m - first)});
      scratch = std::max(scratch, round_up(plans[c].scratch_bytes, size_t{64}));
      tile = std::max(tile, static_cast<size_t>(std::min(shape.rows, m)) * static_cast<size_t>(shape.blocks) *
                                kBlockRows * sizeof(float));
    }
    node.worker_bytes = round_up(scratch + tile, size_t{4096}) + 4096;
    node.bytes = node.worker_bytes * static_cast<size_t>(workers);
    node.streams = !many;
    share_items(node, many ? workers : 1, workers);
  }
}

// Neighbouring items have rows or blocks in common: each worker's own are such, and as much work as the others'.
void LinearWork::State::share_items(Node& node, int shares, int workers) {
  if (static_cast<int>(node.shares.size()) != shares)
    node.shares = std::vector<Share>(static_cast<size_t>(shares));
  const auto cost = [](const Item& item) { return int64_t{item.rows} * item.count; };
  int64_t all = 0, done = 0;
  for (const Item& item : node.items) all += cost(item);
  size_t at = 0;
  for (int s = 0; s < shares; ++s) {
    Share& share = node.shares[static_cast<size_t>(s)];
    share.next.store(static_cast<int>(at), std::memory_order_relaxed);
    for (; at < node.items.size() && done < all * (s + 1) / shares; ++at) done += cost(node.items[at]);
    share.end = static_cast<int>(at);
  }
  if (shares == 1) node.shares[0].next.store(kFirstItems * workers, std::memory_order_relaxed);
}

void LinearWork::State::allocate() {
  grow(shared, rows_bytes);
  for (Rows& r : rows) {
    r.acts = acts_in(r.shape, shared.data() + r.at);
    if (r.plain) r.acts.codes = const_cast<std::byte*>(reinterpret_cast<const std::byte*>(r.x));  // only read
  }
  for (int n = 0; n < pool->nodes(); ++n) {
    Node& node = *nodes[static_cast<size_t>(n)];
    grow(node.memory, node.bytes, {.node = pool->memory_node(n)});
  }
}

void LinearWork::State::pack(int item) noexcept {
  const PackItem& pack = packs[static_cast<size_t>(item)];
  const Rows& r = rows[static_cast<size_t>(pack.of)];
  PackActsArgs args{.source = r.x, .type = Real::kF32, .stride = r.stride, .m = m, .k = r.k, .out = r.acts};
  if (r.shape.beside) {
    args.first = pack.begin;
    args.last = pack.end;
  } else {  // the last rows bring the padding along
    args.source = r.x + pack.begin * r.stride;
    args.m = pack.end - pack.begin;
    args.out = rows_from(r.acts, pack.begin, (pack.end == m ? r.shape.rows : pack.end) - pack.begin);
  }
  calls.front().linear->options_.kernels->pack_acts(args);
  if (packs_left.arrive()) packed.set();
}

void LinearWork::State::multiply(const Item& item, int node, std::byte* mine) noexcept {
  const LinearCall& call = calls[static_cast<size_t>(item.call)];
  const Linear& linear = *call.linear;
  const Linear::Slice& slice = linear.slices_[static_cast<size_t>(node)];
  const Plan& plan = plans[static_cast<size_t>(item.call)];
  const int64_t first = (slice.first_block + item.begin) * kBlockRows;
  const int64_t columns = int64_t{item.count} * kBlockRows, real = std::min(columns, linear.n_ - first);
  // Straight into y where whole blocks fit there.
  const bool direct = real == columns;
  auto* tile = reinterpret_cast<float*>(mine + round_up(plan.scratch_bytes, size_t{64}));
  float* y = call.y + item.first * call.y_stride + first;
  const int64_t ld = direct ? call.y_stride : columns;
  const Acts& acts = rows[static_cast<size_t>(rows_of[static_cast<size_t>(item.call)])].acts;
  plan.multiply({.packing = &slice.packing,
                 .blocks = slice.memory.data() + static_cast<size_t>(item.begin) * slice.packing.block_bytes,
                 .count = item.count,
                 .acts = rows_from(acts, item.first,
                                   item.first + item.rows == m ? acts.shape.rows - item.first : item.rows),
                 .m = item.rows,
                 .out = direct ? y : tile,
                 .ld = ld,
                 .scratch = mine});
  for (int i = 0; i < item.rows; ++i, y += call.y_stride) {
    if (!direct) std::memcpy(y, tile + i * ld, static_cast<size_t>(real) * sizeof(float));
    if (!linear.bias_.empty())
      linear.options_.kernels->add_scaled(y, linear.bias_.data() + first, 1.0f, static_cast<int>(real));
  }
}

void LinearWork::State::work(const Worker& worker) noexcept {
  const int count = static_cast<int>(packs.size());
  for (int i; (i = next_pack.fetch_add(1, std::memory_order_relaxed)) < count;) pack(i);
  Node& node = *nodes[static_cast<size_t>(worker.node)];
  std::byte* mine = node.memory.data() + static_cast<size_t>(worker.rank) * node.worker_bytes;
  packed.wait();
  if (node.shares.size() == 1)
    for (int i = 0, at = worker.rank; i < kFirstItems && at < node.shares[0].end; ++i, at += worker.ranks)
      multiply(node.items[static_cast<size_t>(at)], worker.node, mine);
  for (size_t s = 0; s < node.shares.size(); ++s) {
    Share& share = node.shares[(static_cast<size_t>(worker.rank) + s) % node.shares.size()];
    for (int i; (i = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;)
      multiply(node.items[static_cast<size_t>(i)], worker.node, mine);
  }
}

LinearWork::LinearWork(std::shared_ptr<Pool> pool) : state_(std::make_unique<State>()) {
  state_->pool = std::move(pool);
  for (int n = 0; n < state_->pool->nodes(); ++n) state_->nodes.push_back(std::make_unique<State::Node>());
}
LinearWork::~LinearWork() = default;

size_t LinearWork::bytes() const {
  size_t bytes = state_->shared.size();
  for (const auto& node : state_->nodes) bytes += node->memory.size();
  return bytes;
}

LinearWork::Bytes LinearWork::bytes_for(int m, std::span<const LinearCall> calls) const {
  Bytes bytes;
  if (m == 0 || calls.empty()) return bytes;
  State s;
  s.pool = state_->pool;
  for (size_t n = 0; n < state_->nodes.size(); ++n) s.nodes.push_back(std::make_unique<State::Node>());
  s.m = m;
  s.calls = calls;
  s.plan();
  s.list_items();
  bytes.rows = with_reserve(s.rows_bytes);
  for (const auto& node : s.nodes) bytes.workers += with_reserve(node->bytes);
  return bytes;
}

Ahead LinearWork::first_read(const Worker& worker) const {
  Ahead ahead;
  const State::Node& node = *state_->nodes[static_cast<size_t>(worker.node)];
  const int count = node.streams ? static_cast<int>(node.items.size()) : 0;
  for (int i = 0, at = worker.rank; i < kFirstItems && at < count; ++i, at += worker.ranks) {
    const Item& item = node.items[static_cast<size_t>(at)];
    const Linear& linear = *state_->calls[static_cast<size_t>(item.call)].linear;
    const Linear::Slice& slice = linear.slices_[static_cast<size_t>(worker.node)];
    const size_t block = slice.packing.block_bytes;
    ahead.add({slice.memory.data() + static_cast<size_t>(item.begin) * block,
               static_cast<size_t>(item.count) * block});
  }
  return ahead;
}

void LinearWork::run(int m, std::span<const LinearCall> calls, const Forecast* then) {
  if (m == 0 || calls.empty()) return;
  State& s = *state_;
  KT_CHECK(m > 0, "{} rows", m);
  for (const LinearCall& call : calls)
    KT_CHECK(call.linear && !call.linear->empty() && !call.linear->options_.sizes_only &&
                 call.x_stride >= call.linear->k() && call.y_stride >= call.linear->n() &&
                 static_cast<int>(call.linear->slices_.size()) == s.pool->nodes(),
             "linear: strides {} and {}", call.x_stride, call.y_stride);
  s.m = m;
  s.calls = calls;
  s.plan();
  s.list_items();
  s.allocate();
  s.pool->run([&](const Worker& worker) { s.work(worker); }, then);
}

}  // namespace kt::inline nn
