#include "nn/attention.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "base/signal.h"
#include "nn/carve.h"

namespace kt::inline nn {
namespace {

constexpr int kRows = 128;      // query rows of an item: heads of a group times tokens
constexpr int kMostRows = 256;  // of an item: a group's heads with one token may exceed kRows
constexpr float kLog2e = 1.44269504f;

int group_of(int page) { return page / kGroupBlocks; }
int end_of(int group) { return (group + 1) * kGroupBlocks; }

// The first position that a token at `position` sees; may be below 0.
int oldest_seen(const AttentionArgs& args, int position) {
  if (args.chunk > 0) return position / args.chunk * args.chunk;
  return args.window > 0 ? position - args.window + 1 : 0;
}

// Tokens [begin, begin + count) of a sequence with the heads that share key head `head`; pages [first, last). With
// chosen keys it is one token, and pages are those its keys fill.
struct Item {
  int sequence, head, begin, count;
  int first_page, last_page;
  bool chosen = false;
  int join = -1;  // index of the join this group belongs to; -1: the item is the whole
  int part = 0;   // its number there
};

// Groups of the same rows, joined in order when all are there.
struct Join {
  Item item;  // the rows
  int parts = 0;
  size_t at = 0;  // floats into the partial sums: [parts][AttendSums of the rows]
};
struct JoinState {
  Countdown left{1};
  Signal merged;  // all parts are there, and their tops and sums are factors
};
// Rows [row, end) of a join: what one worker joins.
struct Slice {
  int join, row, end;
};

// Columns of a block of values, which hold the keys where those are shared.
int value_width(const KvShape& shape) { return shape.shared ? shape.d_pad() : shape.dv_pad(); }

// The numbers of the bits in the words of a query, in order.
class ChosenKeys {
 public:
  ChosenKeys(const uint64_t* words, int skipped) : words_(words), bits_(*words) {
    for (int here; skipped >= (here = std::popcount(bits_)); skipped -= here) bits_ = words_[++word_];
    while (skipped-- > 0) bits_ &= bits_ - 1;
  }
  int next() {
    while (bits_ == 0) bits_ = words_[++word_];
    const int bit = std::countr_zero(bits_);
    bits_ &= bits_ - 1;
    return word_ * 64 + bit;
  }

 private:
  const uint64_t* words_;
  int word_ = 0;
  uint64_t bits_;
};

// Memory of a worker: for `rows` rows over a cache of that shape.
struct Scratch {
  float *q, *total;
  uint16_t* q_bf16;
  std::byte *attend, *keys, *values;  // the last two: a group of blocks, where keys are chosen
  size_t bytes;

  Scratch(std::byte* memory, const KvShape& shape, int rows, bool chosen) {
    const auto tiles = static_cast<size_t>(AttendSums::padded(rows)), d = static_cast<size_t>(shape.d_pad());
    Carve carve(memory);
    q = carve.take<float>(static_cast<size_t>(rows) * d);
    total = carve.take<float>(static_cast<size_t>(AttendSums::floats(rows, shape.dv_pad())));
    q_bf16 = carve.take<uint16_t>(tiles * d);
    attend = carve.take<std::byte>(attend_scratch_bytes(shape.type, rows, shape.d_pad(), shape.shared));
    const size_t blocks = chosen ? kGroupBlocks : 0;
    keys = carve.take<std::byte>(shape.shared ? 0 : blocks * shape.block_bytes(shape.d_pad()));
    values = carve.take<std::byte>(blocks * shape.block_bytes(value_width(shape)));
    bytes = carve.used();
  }
};

// Blocks that one call of the kernel takes.
struct GroupOfBlocks {
  std::array<const void*, kGroupBlocks> keys, values;
};

// A worker's memory, and whose queries are in it.
struct Mine {
  std::byte* memory;
  int sequence = -1, head = -1, begin = -1;
};

}  // namespace

struct AttentionWork::State {
  std::shared_ptr<Pool> pool;
  const AttentionKernels* kernels = nullptr;
  std::vector<Item> items;
  std::vector<Join> joins;
  std::vector<Slice> slices;                       // of joins; claimed behind the items
  std::vector<std::unique_ptr<JoinState>> states;  // [joins, or more]
  Buffer partial;
  Buffer memory;  // of the workers
  size_t worker_bytes = 0;
  int item_rows = 0;  // at most
  std::atomic<int> next{0};
  const KvCache* cache = nullptr;
  const AttentionArgs* args = nullptr;

  const KvShape& shape() const { return cache->shape(args->plane); }
  int group() const { return args->heads / shape().heads; }
  // Of an item. A block is fetched, and an int8 one widened, for all rows of an item: as many as the kernels like,
  // where that leaves so many items for each worker that nobody waits long for the last one.
  int tokens_at_once() const {
    int64_t tokens = 0;
    for (const AttentionSequence& of : args->sequences) tokens += of.count;
    const int each = shape().type == KvType::kS8 ? 4 : 8;
    const bool many = tokens * args->heads >= int64_t{each} * pool->threads() * kernels->most_rows;
    return std::max(1, (many && !shape().shared ? kernels->most_rows : kRows) / group());
  }
  const AttentionSequence& sequence(const Item& item) const {
    return args->sequences[static_cast<size_t>(item.sequence)];
  }
  float* part(const Join& join, int i) {
    return reinterpret_cast<float*>(partial.data()) + join.at +
           i * AttendSums::floats(join.item.count * group(), shape().dv_pad());
  }

  void list_items();
  void add_item(Item item, bool split, size_t& partial_floats);
  void list_slices();
  void work(int worker, std::byte* memory) noexcept;
  void take_queries(const Item& item, const Scratch& scratch, Mine& mine) const noexcept;
  int blocks_of(const Item& item, int first_page, const void** blocks) const noexcept;
  void gather_group(const Item& item, int first_page, int count, const Scratch& scratch,
                    GroupOfBlocks& to) const noexcept;
  void add_group(const Item& item, int first_page, const Item* after, const Scratch& scratch,
                 const AttendSums& sums) const noexcept;
  void attend(const Item& item, const Item* after, Mine& mine) noexcept;
  void join(const Slice& slice) noexcept;
  void finish(const Item& item, const AttendSums& sums, int row, int end) const noexcept;
};

void AttentionWork::State::list_items() {
  items.clear();
  joins.clear();
  size_t partial_floats = 0;
  const int at_once = tokens_at_once();
  for (size_t s = 0; s < args->sequences.size(); ++s) {
    const AttentionSequence& sequence = args->sequences[s];
    // Prefill has rows enough for every worker; decode over a long context has not.
    const bool split = sequence.count == 1;
    const int all = args->seen ? std::clamp(args->budget - sequence.position, 0, sequence.count)
                               : sequence.count;  // tokens that see every key
    for (int t = sequence.count - 1; t >= all; --t)
      for (int head = 0; head < shape().heads; ++head)
        add_item({.sequence = static_cast<int>(s),
                  .head = head,
                  .begin = t,
                  .count = 1,
                  .first_page = 0,
                  .last_page = ceil_div(args->budget, kPageTokens),
                  .chosen = true},
                 split, partial_floats);
    // The last tokens see most: whoever is late has little left to do.
    for (int begin = (all - 1) / at_once * at_once; begin >= 0 && all > 0; begin -= at_once) {
      const int count = std::min(at_once, all - begin);
      const int oldest = std::max(0, oldest_seen(*args, sequence.position + begin));
      for (int head = 0; head < shape().heads; ++head)
        add_item({static_cast<int>(s), head, begin, count, oldest / kPageTokens,
                  (sequence.position + begin + count - 1) / kPageTokens + 1},
                 split, partial_floats);
    }
  }
  list_slices();
  const size_t partial_bytes = partial_floats * sizeof(float);
  if (partial.size() < partial_bytes) partial = Buffer(partial_bytes);
  item_rows = at_once * group();
  worker_bytes = round_up(Scratch(nullptr, shape(), item_rows, args->seen != nullptr).bytes, size_t{4096});
  const size_t bytes = worker_bytes * static_cast<size_t>(pool->threads());
  if (memory.size() < bytes) memory = Buffer(bytes);
  next.store(pool->threads(), std::memory_order_relaxed);
}

void AttentionWork::State::add_item(Item item, bool split, size_t& partial_floats) {
  const int parts = group_of(item.last_page - 1) - group_of(item.first_page) + 1;
  if (!split || parts == 1) {
    items.push_back(item);
    return;
  }
  item.join = static_cast<int>(joins.size());
  joins.push_back({item, parts, partial_floats});
  partial_floats += static_cast<size_t>(parts) *
                    static_cast<size_t>(AttendSums::floats(item.count * group(), shape().dv_pad()));
  const int first = item.first_page, last = item.last_page;
  for (item.part = 0; item.part < parts; ++item.part) {
    const int end = end_of(group_of(first) + item.part);
    item.first_page = std::max(first, end - kGroupBlocks);
    item.last_page = std::min(last, end);
    items.push_back(item);
  }
}

// Two for each worker, as far as rows go.
void AttentionWork::State::list_slices() {
  slices.clear();
  const int count = static_cast<int>(joins.size());
  for (int j = 0; j < count; ++j) {
    const Join& join = joins[static_cast<size_t>(j)];
    if (static_cast<int>(states.size()) <= j) states.push_back(std::make_unique<JoinState>());
    states[static_cast<size_t>(j)]->left.reset(join.parts);
    states[static_cast<size_t>(j)]->merged.reset();
    const int rows = join.item.count * group(), each = ceil_div(rows, ceil_div(2 * pool->threads(), count));
    for (int row = 0; row < rows; row += each) slices.push_back({j, row, std::min(rows, row + each)});
  }
}

// Items, then slices of joins, each waiting only for items claimed before it; worker i begins with the i-th. While
// there are many left, the next item is claimed before this one is done: its first blocks are fetched meanwhile.
void AttentionWork::State::work(int worker, std::byte* memory_of_worker) noexcept {
  const int count = static_cast<int>(items.size()), all = count + static_cast<int>(slices.size());
  const int many = count - 2 * pool->threads();
  const auto claim = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
  Mine mine{memory_of_worker};
  for (int i = worker, after; i < all; i = after) {
    after = i < many ? claim() : -1;
    if (i < count)
      attend(items[static_cast<size_t>(i)],
             after >= 0 && after < count ? &items[static_cast<size_t>(after)] : nullptr, mine);
    else
      join(slices[static_cast<size_t>(i - count)]);
    if (after < 0) after = claim();
  }
}

// The item's queries as the kernels want them; a worker's next item is often of the same rows.
void AttentionWork::State::take_queries(const Item& item, const Scratch& scratch, Mine& mine) const noexcept {
  if (mine.sequence == item.sequence && mine.head == item.head && mine.begin == item.begin) return;
  mine = {mine.memory, item.sequence, item.head, item.begin};
  const AttentionSequence& of = sequence(item);
  const int heads = group(), d = shape().d_pad(), rows = item.count * heads;
  const bool narrow = rows >= kernels->narrow_rows;
  for (int r = 0; r < rows; ++r) {
    const float* from = args->q + (of.first + item.begin + r / heads) * args->q_stride +
                        (item.head * heads + r % heads) * shape().d;
    kernels->query(shape().type, from, shape().d, args->scale, d,
                   narrow && shape().type != KvType::kF32 ? nullptr : scratch.q + int64_t{r} * d,
                   scratch.q_bf16 + int64_t{r} * d);
  }
}

// Blocks of the item's group that begins with this page: of keys, or of values where those are the keys.
int AttentionWork::State::blocks_of(const Item& item, int first_page, const void** blocks) const noexcept {
  const int last = std::min(item.last_page, end_of(group_of(first_page)));
  for (int page = first_page; page < last; ++page)
    blocks[page - first_page] = cache->keys(args->plane, sequence(item).pages[page], item.head);
  return last - first_page;
}

// Its chosen keys from page `first_page` of them on, `count` of them, brought together in the worker's memory.
void AttentionWork::State::gather_group(const Item& item, int first_page, int count, const Scratch& scratch,
                                        GroupOfBlocks& to) const noexcept {
  const AttentionSequence& of = sequence(item);
  ChosenKeys chosen(args->seen + (of.first + item.begin) * args->seen_stride, first_page * kPageTokens);
  for (int b = 0; b * kPageTokens < count; ++b) {
    const auto at = static_cast<size_t>(b);
    std::array<const void*, kPageTokens> keys, values;
    std::array<uint8_t, kPageTokens> place;
    GatherArgs gather{
        .type = shape().type, .count = std::min(kPageTokens, count - b * kPageTokens), .place = place.data()};
    for (size_t i = 0; i < static_cast<size_t>(gather.count); ++i) {
      const int key = chosen.next(), page = of.pages[key / kPageTokens];
      place[i] = static_cast<uint8_t>(key % kPageTokens);
      keys[i] = cache->keys(args->plane, page, item.head);
      values[i] = cache->values(args->plane, page, item.head);
    }
    const auto take = [&](bool of_keys, int width, std::byte* blocks, const void* const* from) {
      gather.keys = of_keys;
      gather.width = width;
      gather.from = from;
      gather.to = blocks + at * shape().block_bytes(width);
      kernels->gather(gather);
      return gather.to;
    };
    if (!shape().shared) to.keys[at] = take(true, shape().d_pad(), scratch.keys, keys.data());
    to.values[at] = take(false, value_width(shape()), scratch.values, values.data());
  }
}

void AttentionWork::State::add_group(const Item& item, int first_page, const Item* after,
                                     const Scratch& scratch, const AttendSums& sums) const noexcept {
  const AttentionSequence& of = sequence(item);
  const int start = first_page * kPageTokens, heads = group(), rows = item.count * heads;
  std::array<int32_t, kMostRows> begin, end;
  for (int r = 0; r < rows; ++r) {
    const int position = of.position + item.begin + r / heads;
    begin[static_cast<size_t>(r)] = oldest_seen(*args, position) - start;
    end[static_cast<size_t>(r)] = (item.chosen ? args->budget : position + 1) - start;
  }
  GroupOfBlocks group;
  std::array<const void*, kGroupBlocks> ahead;
  const int blocks = std::min(item.last_page, end_of(group_of(first_page))) - first_page;
  const int last = item.chosen ? args->budget : of.position + item.begin + item.count;
  const int keys = std::min(blocks * kPageTokens, last - start);
  int more = 0;
  if (item.chosen) {
    gather_group(item, first_page, keys, scratch, group);
  } else {
    blocks_of(item, first_page, group.keys.data());
    for (int b = 0; b < blocks; ++b)
      group.values[static_cast<size_t>(b)] = cache->values(args->plane, of.pages[first_page + b], item.head);
    const int next_page = first_page + blocks;
    more = next_page < item.last_page ? blocks_of(item, next_page, ahead.data())
           : after && !after->chosen  ? blocks_of(*after, after->first_page, ahead.data())
                                      : 0;
  }
  kernels->attend({.type = shape().type,
                   .rows = rows,
                   .d = shape().d_pad(),
                   .dv = shape().dv_pad(),
                   .q = scratch.q,
                   .q_bf16 = scratch.q_bf16,
                   .k = shape().shared ? nullptr : group.keys.data(),
                   .v = group.values.data(),
                   .v_width = value_width(shape()),
                   .keys = keys,
                   .next = ahead.data(),
                   .next_count = more,
                   .next_bytes = static_cast<int64_t>(shape().block_bytes(shape().d_pad())),
                   .begin = begin.data(),
                   .end = end.data(),
                   .first = first_page == item.first_page,
                   .scratch = scratch.attend,
                   .sums = sums});
}

void AttentionWork::State::attend(const Item& item, const Item* after, Mine& mine) noexcept {
  const int rows = item.count * group();
  const Scratch scratch(mine.memory, shape(), item_rows, args->seen != nullptr);
  const Join* join = item.join < 0 ? nullptr : &joins[static_cast<size_t>(item.join)];
  const AttendSums sums = AttendSums::in(join ? part(*join, item.part) : scratch.total, rows);
  take_queries(item, scratch, mine);
  for (int page = item.first_page; page < item.last_page; page = end_of(group_of(page)))
    add_group(item, page, after, scratch, sums);
  if (!join) return finish(item, sums, 0, rows);
  JoinState& state = *states[static_cast<size_t>(item.join)];
  if (!state.left.arrive()) return;
  const AttendSums whole = AttendSums::in(part(*join, 0), rows);
  for (int i = 1; i < join->parts; ++i) {
    const AttendSums next_part = AttendSums::in(part(*join, i), rows);
    kernels->merge(static_cast<int>(AttendSums::padded(rows)), whole.top, whole.sum, next_part.top,
                   next_part.sum);
  }
  state.merged.set();
}

void AttentionWork::State::join(const Slice& slice) noexcept {
  const Join& join = joins[static_cast<size_t>(slice.join)];
  states[static_cast<size_t>(slice.join)]->merged.wait();
  const int rows = join.item.count * group();
  kernels->join({.parts = part(join, 0),
                 .count = join.parts,
                 .rows = rows,
                 .dv = shape().dv_pad(),
                 .row = slice.row,
                 .end = slice.end});
  finish(join.item, AttendSums::in(part(join, 0), rows), slice.row, slice.end);
}

// Divides by the sums, sinks included, and puts rows [row, end) where they belong.
void AttentionWork::State::finish(const Item& item, const AttendSums& sums, int row, int end) const noexcept {
  const AttentionSequence& of = sequence(item);
  const int heads = group();
  for (int r = row; r < end; ++r) {
    const int head = item.head * heads + r % heads;
    float factor = 1 / sums.sum[r];
    if (args->sinks) {
      const float sink = args->sinks[head] * kLog2e, most = std::max(sums.top[r], sink);
      const float shrink = std::exp2(sums.top[r] - most);
      factor = shrink / (sums.sum[r] * shrink + std::exp2(sink - most));
    }
    const float* from = sums.out + static_cast<size_t>(r) * static_cast<size_t>(shape().dv_pad());
    float* to = args->out + (of.first + item.begin + r / heads) * args->out_stride + head * shape().dv;
    for (int i = 0; i < shape().dv; ++i) to[i] = from[i] * factor;
  }
}

AttentionWork::AttentionWork(std::shared_ptr<Pool> pool, const Kernels& kernels)
    : state_(std::make_unique<State>()) {
  state_->pool = std::move(pool);
  state_->kernels = kernels.attention;
}
AttentionWork::~AttentionWork() = default;

size_t AttentionWork::bytes_for(const KvShape& shape, int heads, int sequences, int context,
                                int budget) const {
  const int keys = budget > 0 ? std::min(budget, context) : context;
  const auto groups = static_cast<size_t>(ceil_div(keys, kGroupKeys));
  const size_t splits = groups * static_cast<size_t>(sequences) * static_cast<size_t>(shape.heads) *
                        static_cast<size_t>(AttendSums::floats(heads / shape.heads, shape.dv_pad()));
  const int rows = std::max(state_->kernels->most_rows, heads / shape.heads);
  const size_t worker = round_up(Scratch(nullptr, shape, rows, budget > 0).bytes, size_t{4096});
  return splits * sizeof(float) + worker * static_cast<size_t>(state_->pool->threads());
}

Ahead AttentionWork::first_read(const KvCache& cache, int plane, std::span<const AttentionSequence> sequences,
                                const Worker& worker) const {
  Ahead ahead;
  const State& s = *state_;
  const KvShape& shape = cache.shape(plane);
  const auto at = static_cast<size_t>(worker.index);
  if (at >= s.items.size() || s.items[at].head >= shape.heads) return ahead;
  const Item& item = s.items[at];
  if (item.chosen) return ahead;  // which keys is not known yet
  const int last = std::min(item.last_page, item.first_page + kGroupBlocks);
  const auto add = [&](const std::byte* block, int width) { ahead.add({block, shape.block_bytes(width)}); };
  for (int p = item.first_page; p < last; ++p) {
    const int page = sequences[static_cast<size_t>(item.sequence)].pages[p];
    if (!shape.shared) add(cache.keys(plane, page, item.head), shape.d_pad());
    add(cache.values(plane, page, item.head), shape.shared ? shape.d_pad() : shape.dv_pad());
  }
  return ahead;
}

void AttentionWork::run(const KvCache& cache, const AttentionArgs& args, const Forecast* then) {
  State& s = *state_;
  const KvShape& shape = cache.shape(args.plane);
  KT_CHECK(args.heads > 0 && args.heads % shape.heads == 0 && args.heads / shape.heads <= kMostRows,
           "attention: {} heads over {} of the cache", args.heads, shape.heads);
  KT_CHECK(args.q_stride >= args.heads * shape.d && args.out_stride >= args.heads * shape.dv,
           "attention: strides");
  KT_CHECK(args.window == 0 || args.chunk == 0, "attention: a window of {} in chunks of {}", args.window,
           args.chunk);
  KT_CHECK(!args.seen || (args.budget > 0 && args.window == 0 && args.chunk == 0),
           "attention: {} keys chosen in a window of {} or chunks of {}", args.budget, args.window,
           args.chunk);
  s.cache = &cache;
  s.args = &args;
  s.list_items();
  s.pool->run(
      [&](const Worker& worker) {
        s.work(worker.index, s.memory.data() + static_cast<size_t>(worker.index) * s.worker_bytes);
      },
      then);
}

}  // namespace kt::inline nn
