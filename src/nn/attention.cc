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

constexpr int kRows = 32;       // query rows of an item: heads of a group times tokens
constexpr int kMostRows = 256;  // of an item: a group's heads with one token may exceed kRows
constexpr int kSplitPages =
    16;  // pages one item walks at most when it has few rows; longer contexts are split and joined

// Tokens [begin, begin + count) of a sequence with the heads that share key head `head`; pages [first, last).
struct Item {
  int sequence, head, begin, count;
  int first_page, last_page;
  int join = -1;  // index of the join this split belongs to; -1: the item is the whole
  int part = 0;   // its number there
};

// Splits of the same rows, joined in order by the worker that finishes last.
struct Join {
  int parts = 0;
  size_t at = 0;  // floats into the partial sums: [parts][rows * (2 + dv)]
};

}  // namespace

void write_cache(KvCache& cache, const Kernels& kernels, const CacheWrite& args) {
  const KvShape& shape = cache.shape();
  const auto put = [&](std::byte* page, int width, int width_pad, int slot, const float* from) {
    std::byte* to = page + static_cast<size_t>(slot) * static_cast<size_t>(width_pad) * shape.element_bytes();
    kernels.store(to, shape.type, from, width);
    if (width < width_pad) {
      const float zeros[16] = {};
      kernels.store(to + static_cast<size_t>(width) * shape.element_bytes(), shape.type, zeros,
                    width_pad - width);
    }
  };
  for (const AttentionSequence& sequence : args.sequences)
    for (int t = 0; t < sequence.count; ++t) {
      const int position = sequence.position + t, row = sequence.first + t;
      const int page = sequence.pages[position / kPageTokens], slot = position % kPageTokens;
      for (int h = 0; h < shape.heads; ++h) {
        put(cache.keys(args.layer, page, h), shape.d, shape.d_pad(), slot,
            args.k + row * args.k_stride + h * shape.d);
        if (!shape.shared)
          put(cache.values(args.layer, page, h), shape.dv, shape.dv_pad(), slot,
              args.v + row * args.v_stride + h * shape.dv);
      }
    }
}

struct AttentionWork::State {
  std::shared_ptr<Pool> pool;
  const Kernels* kernels = nullptr;
  std::vector<Item> items;
  std::vector<Join> joins;
  std::vector<std::unique_ptr<Countdown>> left;  // [joins]
  std::vector<float> partial;
  std::vector<float> memory;  // of the workers
  std::atomic<int> next{0};
  const KvCache* cache = nullptr;
  const AttentionArgs* args = nullptr;

  int group() const { return args->heads / cache->shape().heads; }
  size_t worker_floats() const {
    const KvShape& s = cache->shape();
    const auto rows = static_cast<size_t>(std::max(kRows, group()));
    return rows * static_cast<size_t>(s.d_pad() + s.dv_pad() + kPageTokens + 2) + 16;
  }
  size_t sums_floats(int rows) const {
    return static_cast<size_t>(rows) * static_cast<size_t>(cache->shape().dv_pad() + 2);
  }

  void list_items();
  void attend(const Item& item, float* mine) noexcept;
  void finish(const Item& item, const float* top, const float* sum, const float* out) noexcept;
  void join(const Item& item) noexcept;
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
      const int first = oldest / kPageTokens;
      const int last = (sequence.position + begin + count - 1) / kPageTokens + 1;
      // Prefill has rows enough for every worker; decode over a long context has not. The choice must not
      // depend on the company, so it looks at this sequence alone.
      const bool split = sequence.count < tokens_at_once && last - first > kSplitPages;
      for (int head = 0; head < cache->shape().heads; ++head) {
        Item item{static_cast<int>(s), head, begin, count, first, last};
        if (!split) {
          items.push_back(item);
          continue;
        }
        Join join{static_cast<int>(ceil_div(last - first, kSplitPages)), partial_floats};
        partial_floats += static_cast<size_t>(join.parts) * sums_floats(count * group());
        item.join = static_cast<int>(joins.size());
        for (int part = 0; part < join.parts; ++part) {
          item.part = part;
          item.first_page = first + part * kSplitPages;
          item.last_page = std::min(last, item.first_page + kSplitPages);
          items.push_back(item);
        }
        joins.push_back(join);
      }
    }
  }
  left.clear();
  for (const Join& join : joins) left.push_back(std::make_unique<Countdown>(join.parts));
  partial.resize(partial_floats);
  memory.resize(worker_floats() * static_cast<size_t>(pool->threads()));
  next.store(0, std::memory_order_relaxed);
}

void AttentionWork::State::attend(const Item& item, float* mine) noexcept {
  const KvShape& shape = cache->shape();
  const AttentionSequence& sequence = args->sequences[static_cast<size_t>(item.sequence)];
  const int heads = group(), rows = item.count * heads, d = shape.d_pad(), dv = shape.dv_pad();
  float* q = mine;
  float* out = q + static_cast<size_t>(rows) * static_cast<size_t>(d);
  float* scores = out + static_cast<size_t>(rows) * static_cast<size_t>(dv);
  float* top = scores + static_cast<size_t>(rows) * kPageTokens;
  float* sum = top + rows;
  if (item.join >= 0) {
    top = partial.data() + joins[static_cast<size_t>(item.join)].at +
          static_cast<size_t>(item.part) * sums_floats(rows);
    sum = top + rows;
    out = sum + rows;
  }
  for (int r = 0; r < rows; ++r) {
    const float* from = args->q + (sequence.first + item.begin + r / heads) * args->q_stride +
                        (item.head * heads + r % heads) * shape.d;
    float* to = q + static_cast<size_t>(r) * static_cast<size_t>(d);
    for (int i = 0; i < shape.d; ++i) to[i] = from[i] * args->scale;
    std::fill(to + shape.d, to + d, 0.0f);
  }
  std::fill_n(out, static_cast<size_t>(rows) * static_cast<size_t>(dv), 0.0f);
  std::fill_n(top, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(sum, rows, 0.0f);
  std::array<int32_t, kMostRows> begin, end;
  for (int page = item.first_page; page < item.last_page; ++page) {
    const int start = page * kPageTokens;
    const int seen = std::min(kPageTokens, sequence.position + item.begin + item.count - start);
    for (int r = 0; r < rows; ++r) {
      const int position = sequence.position + item.begin + r / heads;
      begin[static_cast<size_t>(r)] = args->window ? position - args->window + 1 - start : 0;
      end[static_cast<size_t>(r)] = position + 1 - start;
    }
    kernels->attend({.q = q,
                     .q_stride = d,
                     .rows = rows,
                     .k = cache->keys(args->layer, sequence.pages[page], item.head),
                     .v = cache->values(args->layer, sequence.pages[page], item.head),
                     .type = shape.type,
                     .k_stride = d,
                     .v_stride = shape.shared ? d : dv,
                     .keys = seen,
                     .begin = begin.data(),
                     .end = end.data(),
                     .d = d,
                     .dv = dv,
                     .scores = scores,
                     .top = top,
                     .sum = sum,
                     .out = out});
  }
  if (item.join < 0) {
    finish(item, top, sum, out);
  } else if (left[static_cast<size_t>(item.join)]->arrive()) {
    join(item);
  }
}

// Divides by the sums, sinks included, and puts the rows where they belong.
void AttentionWork::State::finish(const Item& item, const float* top, const float* sum,
                                  const float* out) noexcept {
  const KvShape& shape = cache->shape();
  const AttentionSequence& sequence = args->sequences[static_cast<size_t>(item.sequence)];
  const int heads = group();
  for (int r = 0; r < item.count * heads; ++r) {
    const int head = item.head * heads + r % heads;
    float factor = 1 / sum[r];
    if (args->sinks) {
      const float sink = args->sinks[head], most = std::max(top[r], sink);
      const float shrink = std::exp(top[r] - most);
      factor = shrink / (sum[r] * shrink + std::exp(sink - most));
    }
    const float* from = out + static_cast<size_t>(r) * static_cast<size_t>(shape.dv_pad());
    float* to = args->out + (sequence.first + item.begin + r / heads) * args->out_stride + head * shape.dv;
    for (int i = 0; i < shape.dv; ++i) to[i] = from[i] * factor;
  }
}

// Adds the splits of an item's rows in page order into the first one.
void AttentionWork::State::join(const Item& item) noexcept {
  const Join& join = joins[static_cast<size_t>(item.join)];
  const int rows = item.count * group(), dv = cache->shape().dv_pad();
  float* all = partial.data() + join.at;
  for (int r = 0; r < rows; ++r) {
    float* top = all + r;
    float* sum = all + rows + r;
    float* out = all + 2 * rows + r * dv;
    for (int part = 1; part < join.parts; ++part) {
      const float* other = all + static_cast<size_t>(part) * sums_floats(rows);
      const float other_top = other[r], most = std::max(*top, other_top);
      if (other[rows + r] == 0) continue;  // its keys were all outside the window
      const float mine = *sum == 0 ? 0 : std::exp(*top - most), its = std::exp(other_top - most);
      *sum = *sum * mine + other[rows + r] * its;
      const float* add = other + 2 * rows + r * dv;
      for (int i = 0; i < dv; ++i) out[i] = out[i] * mine + add[i] * its;
      *top = most;
    }
  }
  finish(item, all, all + rows, all + 2 * rows);
}

AttentionWork::AttentionWork(std::shared_ptr<Pool> pool, const Kernels& kernels)
    : state_(std::make_unique<State>()) {
  state_->pool = std::move(pool);
  state_->kernels = &kernels;
}
AttentionWork::~AttentionWork() = default;

void AttentionWork::run(const KvCache& cache, const AttentionArgs& args) {
  State& s = *state_;
  const KvShape& shape = cache.shape();
  KT_CHECK(args.heads > 0 && args.heads % shape.heads == 0 && args.heads / shape.heads <= kMostRows,
           "attention: {} heads over {} of the cache", args.heads, shape.heads);
  KT_CHECK(args.q_stride >= args.heads * shape.d && args.out_stride >= args.heads * shape.dv,
           "attention: strides");
  s.cache = &cache;
  s.args = &args;
  s.list_items();
  s.pool->run([&](const Worker& worker) {
    float* mine = s.memory.data() + static_cast<size_t>(worker.index) * s.worker_floats();
    for (int i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < static_cast<int>(s.items.size());)
      s.attend(s.items[static_cast<size_t>(i)], mine);
  });
}

}  // namespace kt
