#include "nn/attention.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "base/signal.h"

namespace kt {
namespace {

constexpr int kRows = 128;      // query rows of an item: heads of a group times tokens
constexpr int kMostRows = 256;  // of an item: a group's heads with one token may exceed kRows
constexpr int kGroupPages = 4;  // pages summed one after another; groups of them are joined in order

int group_of(int page) { return page / kGroupPages; }

// Tokens [begin, begin + count) of a sequence with the heads that share key head `head`; pages [first, last).
struct Item {
  int sequence, head, begin, count;
  int first_page, last_page;
  int join = -1;  // index of the join this group belongs to; -1: the item is the whole
  int part = 0;   // its number there
};

// Groups of the same rows, joined in order by the worker that finishes last.
struct Join {
  int parts = 0;
  size_t at = 0;  // floats into the partial sums: [parts][sums of the rows]
};

// What rows have gathered so far.
struct Sums {
  float* top;
  float* sum;
  float* out;  // [rows, dv]

  static size_t floats(int rows, int dv) { return static_cast<size_t>(rows) * static_cast<size_t>(dv + 2); }
  static Sums in(float* memory, int rows) { return {memory, memory + rows, memory + 2 * rows}; }
  void clear(int rows, int dv) const {
    std::fill_n(top, rows, -std::numeric_limits<float>::infinity());
    std::fill_n(sum, rows, 0.0f);
    std::fill_n(out, static_cast<size_t>(rows) * static_cast<size_t>(dv), 0.0f);
  }
  // Adds what the same rows gathered behind this.
  void join(const Sums& next, int rows, int dv, const AttentionKernels& kernels) const {
    for (int r = 0; r < rows; ++r) {
      if (next.sum[r] == 0) continue;  // saw nothing there
      const float most = std::max(top[r], next.top[r]);
      const float mine = sum[r] == 0 ? 0 : std::exp(top[r] - most), its = std::exp(next.top[r] - most);
      sum[r] = sum[r] * mine + next.sum[r] * its;
      kernels.join(out + int64_t{r} * dv, mine, next.out + int64_t{r} * dv, its, dv);
      top[r] = most;
    }
  }
};

// Pieces of one worker's memory, each on its own cache lines; without memory, only their sizes.
class Carve {
 public:
  explicit Carve(std::byte* memory) : memory_(memory) {}
  template <typename T>
  T* take(size_t count) {
    auto* out = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += round_up(count * sizeof(T), size_t{64});
    return out;
  }
  size_t used() const { return used_; }

 private:
  std::byte* memory_;
  size_t used_ = 0;
};

// Memory of a worker: for `rows` rows over a cache of that shape.
struct Scratch {
  float *q, *scores, *shrink, *total, *group;
  uint16_t *q_bf16, *weights;
  std::byte* keys;  // a block, for a cache that has only values
  size_t bytes;

  Scratch(std::byte* memory, const KvShape& shape, int rows) {
    const size_t tiles = round_up(static_cast<size_t>(rows), size_t{16});
    const auto d = static_cast<size_t>(shape.d_pad());
    Carve carve(memory);
    q = carve.take<float>(static_cast<size_t>(rows) * d);
    scores = carve.take<float>(tiles * kPageTokens);
    shrink = carve.take<float>(static_cast<size_t>(rows));
    total = carve.take<float>(Sums::floats(rows, shape.dv_pad()));
    group = carve.take<float>(Sums::floats(rows, shape.dv_pad()));
    q_bf16 = carve.take<uint16_t>(tiles * d);
    weights = carve.take<uint16_t>(tiles * kPageTokens);
    keys = carve.take<std::byte>(shape.shared ? shape.block_bytes(shape.d_pad()) : 0);
    bytes = carve.used();
  }
};

}  // namespace

struct AttentionWork::State {
  std::shared_ptr<Pool> pool;
  const AttentionKernels* kernels = nullptr;
  std::vector<Item> items;
  std::vector<Join> joins;
  std::vector<std::unique_ptr<Countdown>> left;  // [joins]
  std::vector<float> partial;
  Buffer memory;  // of the workers
  size_t worker_bytes = 0;
  std::atomic<int> next{0};
  const KvCache* cache = nullptr;
  const AttentionArgs* args = nullptr;

  int group() const { return args->heads / cache->shape(args->plane).heads; }
  int most_rows() const { return std::max(kRows / group() * group(), group()); }

  void list_items();
  void add_item(Item item, bool split, size_t& partial_floats);
  void take_queries(const Item& item, int rows, const Scratch& scratch) const noexcept;
  void add_page(const Item& item, int page, int rows, const Scratch& scratch,
                const Sums& sums) const noexcept;
  void attend(const Item& item, std::byte* mine) noexcept;
  void finish(const Item& item, const Sums& sums) const noexcept;
};

void AttentionWork::State::list_items() {
  items.clear();
  joins.clear();
  size_t partial_floats = 0;
  const int tokens_at_once = std::max(1, kRows / group());
  for (size_t s = 0; s < args->sequences.size(); ++s) {
    const AttentionSequence& sequence = args->sequences[s];
    for (int begin = 0; begin < sequence.count; begin += tokens_at_once) {
      const int count = std::min(tokens_at_once, sequence.count - begin);
      const int oldest = args->window ? std::max(0, sequence.position + begin - args->window + 1) : 0;
      // Prefill has rows enough for every worker; decode over a long context has not.
      const bool split = sequence.count == 1;
      for (int head = 0; head < cache->shape(args->plane).heads; ++head)
        add_item({static_cast<int>(s), head, begin, count, oldest / kPageTokens,
                  (sequence.position + begin + count - 1) / kPageTokens + 1},
                 split, partial_floats);
    }
  }
  left.clear();
  for (const Join& join : joins) left.push_back(std::make_unique<Countdown>(join.parts));
  if (partial.size() < partial_floats) partial.resize(partial_floats);
  worker_bytes = round_up(Scratch(nullptr, cache->shape(args->plane), most_rows()).bytes, size_t{4096});
  const size_t bytes = worker_bytes * static_cast<size_t>(pool->threads());
  if (memory.size() < bytes) memory = Buffer(bytes);
  next.store(0, std::memory_order_relaxed);
}

void AttentionWork::State::add_item(Item item, bool split, size_t& partial_floats) {
  const int parts = group_of(item.last_page - 1) - group_of(item.first_page) + 1;
  if (!split || parts == 1) {
    items.push_back(item);
    return;
  }
  item.join = static_cast<int>(joins.size());
  joins.push_back({parts, partial_floats});
  partial_floats +=
      static_cast<size_t>(parts) * Sums::floats(item.count * group(), cache->shape(args->plane).dv_pad());
  const int first = item.first_page, last = item.last_page;
  for (item.part = 0; item.part < parts; ++item.part) {
    const int begin = (group_of(first) + item.part) * kGroupPages;
    item.first_page = std::max(first, begin);
    item.last_page = std::min(last, begin + kGroupPages);
    items.push_back(item);
  }
}

// The item's queries, scaled and padded; for a bf16 cache rounded likewise.
void AttentionWork::State::take_queries(const Item& item, int rows, const Scratch& scratch) const noexcept {
  const KvShape& shape = cache->shape(args->plane);
  const AttentionSequence& sequence = args->sequences[static_cast<size_t>(item.sequence)];
  const int heads = group(), d = shape.d_pad();
  for (int r = 0; r < rows; ++r) {
    const float* from = args->q + (sequence.first + item.begin + r / heads) * args->q_stride +
                        (item.head * heads + r % heads) * shape.d;
    kernels->query(shape.type, from, shape.d, args->scale, d, scratch.q + int64_t{r} * d,
                   scratch.q_bf16 + int64_t{r} * d);
  }
}

void AttentionWork::State::add_page(const Item& item, int page, int rows, const Scratch& scratch,
                                    const Sums& sums) const noexcept {
  const KvShape& shape = cache->shape(args->plane);
  const AttentionSequence& sequence = args->sequences[static_cast<size_t>(item.sequence)];
  const int start = page * kPageTokens, heads = group();
  std::array<int32_t, kMostRows> begin, end;
  for (int r = 0; r < rows; ++r) {
    const int position = sequence.position + item.begin + r / heads;
    begin[static_cast<size_t>(r)] = args->window ? position - args->window + 1 - start : 0;
    end[static_cast<size_t>(r)] = position + 1 - start;
  }
  const auto scales = [&](const std::byte* block, int columns) {
    return reinterpret_cast<const float*>(block + static_cast<size_t>(kPageTokens * columns));
  };
  const std::byte* values = cache->values(args->plane, sequence.pages[page], item.head);
  const std::byte* keys = cache->keys(args->plane, sequence.pages[page], item.head);
  const int v_width = shape.shared ? shape.d_pad() : shape.dv_pad();
  const float* k_scales = scales(keys, shape.d_pad());
  if (shape.shared) {
    kernels->keys_of_values(shape.type, values, v_width, scratch.keys);
    keys = scratch.keys;
  }
  const bool more = page + 1 < item.last_page;
  const int next = more ? sequence.pages[page + 1] : 0;
  kernels->attend({.type = shape.type,
                   .rows = rows,
                   .d = shape.d_pad(),
                   .dv = shape.dv_pad(),
                   .q = scratch.q,
                   .q_bf16 = scratch.q_bf16,
                   .k = keys,
                   .v = values,
                   .v_width = v_width,
                   .k_scales = k_scales,
                   .v_scales = scales(values, v_width),
                   .keys = std::min(kPageTokens, sequence.position + item.begin + item.count - start),
                   .next_k = more ? cache->keys(args->plane, next, item.head) : nullptr,
                   .next_v = more ? cache->values(args->plane, next, item.head) : nullptr,
                   .next_k_bytes = shape.shared ? 0 : static_cast<int64_t>(shape.block_bytes(shape.d_pad())),
                   .next_v_bytes = static_cast<int64_t>(shape.block_bytes(v_width)),
                   .begin = begin.data(),
                   .end = end.data(),
                   .scores = scratch.scores,
                   .weights = scratch.weights,
                   .shrink = scratch.shrink,
                   .top = sums.top,
                   .sum = sums.sum,
                   .out = sums.out});
}

void AttentionWork::State::attend(const Item& item, std::byte* mine) noexcept {
  const int rows = item.count * group(), dv = cache->shape(args->plane).dv_pad();
  const Scratch scratch(mine, cache->shape(args->plane), most_rows());
  const Join* join = item.join < 0 ? nullptr : &joins[static_cast<size_t>(item.join)];
  const auto part = [&](int i) {
    return Sums::in(partial.data() + join->at + static_cast<size_t>(i) * Sums::floats(rows, dv), rows);
  };
  take_queries(item, rows, scratch);
  const Sums total = join ? part(item.part) : Sums::in(scratch.total, rows);
  const int first_group = group_of(item.first_page);
  for (int g = first_group; g <= group_of(item.last_page - 1); ++g) {
    const Sums here = g == first_group ? total : Sums::in(scratch.group, rows);
    here.clear(rows, dv);
    const int end = std::min(item.last_page, (g + 1) * kGroupPages);
    for (int page = std::max(item.first_page, g * kGroupPages); page < end; ++page)
      add_page(item, page, rows, scratch, here);
    if (g > first_group) total.join(here, rows, dv, *kernels);
  }
  if (join) {
    if (!left[static_cast<size_t>(item.join)]->arrive()) return;
    for (int i = 1; i < join->parts; ++i) part(0).join(part(i), rows, dv, *kernels);
  }
  finish(item, join ? part(0) : total);
}

// Divides by the sums, sinks included, and puts the rows where they belong.
void AttentionWork::State::finish(const Item& item, const Sums& sums) const noexcept {
  const KvShape& shape = cache->shape(args->plane);
  const AttentionSequence& sequence = args->sequences[static_cast<size_t>(item.sequence)];
  const int heads = group();
  for (int r = 0; r < item.count * heads; ++r) {
    const int head = item.head * heads + r % heads;
    float factor = 1 / sums.sum[r];
    if (args->sinks) {
      const float sink = args->sinks[head], most = std::max(sums.top[r], sink);
      const float shrink = std::exp(sums.top[r] - most);
      factor = shrink / (sums.sum[r] * shrink + std::exp(sink - most));
    }
    const float* from = sums.out + static_cast<size_t>(r) * static_cast<size_t>(shape.dv_pad());
    float* to = args->out + (sequence.first + item.begin + r / heads) * args->out_stride + head * shape.dv;
    for (int i = 0; i < shape.dv; ++i) to[i] = from[i] * factor;
  }
}

AttentionWork::AttentionWork(std::shared_ptr<Pool> pool, const Kernels& kernels)
    : state_(std::make_unique<State>()) {
  state_->pool = std::move(pool);
  state_->kernels = kernels.attention;
}
AttentionWork::~AttentionWork() = default;

size_t AttentionWork::bytes_for(const KvShape& shape, int heads, int sequences, int context) const {
  const auto groups = static_cast<size_t>(ceil_div(ceil_div(context, kPageTokens), kGroupPages));
  const size_t splits = groups * static_cast<size_t>(sequences) * Sums::floats(heads, shape.dv_pad());
  const int rows = std::max(kRows, heads / shape.heads);
  const size_t worker = round_up(Scratch(nullptr, shape, rows).bytes, size_t{4096});
  return splits * sizeof(float) + worker * static_cast<size_t>(state_->pool->threads());
}

void AttentionWork::run(const KvCache& cache, const AttentionArgs& args) {
  State& s = *state_;
  const KvShape& shape = cache.shape(args.plane);
  KT_CHECK(args.heads > 0 && args.heads % shape.heads == 0 && args.heads / shape.heads <= kMostRows,
           "attention: {} heads over {} of the cache", args.heads, shape.heads);
  KT_CHECK(args.q_stride >= args.heads * shape.d && args.out_stride >= args.heads * shape.dv,
           "attention: strides");
  s.cache = &cache;
  s.args = &args;
  s.list_items();
  s.pool->run([&](const Worker& worker) {
    std::byte* mine = s.memory.data() + static_cast<size_t>(worker.index) * s.worker_bytes;
    for (int i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < static_cast<int>(s.items.size());)
      s.attend(s.items[static_cast<size_t>(i)], mine);
  });
}

}  // namespace kt
