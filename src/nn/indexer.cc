#include "nn/indexer.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "base/signal.h"
#include "nn/carve.h"

namespace kt::inline nn {
namespace {

// Tokens whose scores are held at once, for each worker; a long context has many for each.
constexpr int kTokensOfWorker = 4;

// A query that chooses.
struct Query {
  int sequence, token, position;  // its row of the step
  int groups() const { return position / kGroupKeys + 1; }
};

// Memory of a worker: queries as kernels want them, and what they need.
struct Scratch {
  float* q;
  uint16_t* q_bf16;
  std::byte* kernel;
  size_t bytes;

  Scratch(std::byte* memory, const KvShape& shape, int heads) {
    const auto d = static_cast<size_t>(shape.d_pad()), rows = static_cast<size_t>(AttendSums::padded(heads));
    Carve carve(memory);
    q = carve.take<float>(static_cast<size_t>(heads) * d);
    q_bf16 = carve.take<uint16_t>(rows * d);
    kernel = carve.take<std::byte>(attend_scratch_bytes(shape.type, heads, shape.d_pad(), false));
    bytes = carve.used();
  }
};

int64_t score_stride(int context) { return round_up<int64_t>(context, kGroupKeys); }

}  // namespace

struct IndexerWork::State {
  std::shared_ptr<Pool> pool;
  const AttentionKernels* kernels = nullptr;
  std::vector<Query> queries;
  std::vector<std::unique_ptr<Countdown>> left;  // groups of a query without scores, or more
  std::vector<int> first_items;                  // [queries of a wave + 1]
  Buffer scores;                                 // [queries of a wave, stride]
  Buffer memory;                                 // of the workers
  size_t worker_bytes = 0;
  int64_t stride = 0;
  std::atomic<int> next{0};
  const KvCache* cache = nullptr;
  const IndexerArgs* args = nullptr;

  const KvShape& shape() const { return cache->shape(args->plane); }
  int most_queries() const { return kTokensOfWorker * pool->threads(); }

  void list_queries();
  void run_wave(size_t first, int count);
  void score(const Query& query, int group, float* to, std::byte* of_worker) const noexcept;
};

void IndexerWork::State::list_queries() {
  queries.clear();
  int longest = 0;
  for (size_t s = 0; s < args->sequences.size(); ++s) {
    const AttentionSequence& of = args->sequences[s];
    for (int t = 0; t < of.count; ++t) {
      const int position = of.position + t;
      if (!chooses(args->budget, position)) continue;
      queries.push_back({static_cast<int>(s), of.first + t, position});
      longest = std::max(longest, position + 1);
    }
  }
  if (queries.empty()) return;
  stride = score_stride(longest);
  const auto wave = std::min(static_cast<size_t>(most_queries()), queries.size());
  const size_t bytes = wave * static_cast<size_t>(stride) * sizeof(float);
  if (scores.size() < bytes) scores = Buffer(bytes);
  worker_bytes = round_up(Scratch(nullptr, shape(), args->heads).bytes, size_t{4096});
  const size_t all = worker_bytes * static_cast<size_t>(pool->threads());
  if (memory.size() < all) memory = Buffer(all);
  while (left.size() < wave) left.push_back(std::make_unique<Countdown>(1));
}

// Scores of the keys of a group of pages.
void IndexerWork::State::score(const Query& query, int group, float* to,
                               std::byte* of_worker) const noexcept {
  const Scratch scratch(of_worker, shape(), args->heads);
  const int d = shape().d_pad(), heads = args->heads;
  const bool narrow = heads >= kernels->narrow_rows && shape().type != KvType::kF32;
  const float* from = args->q + query.token * args->q_stride;
  for (int h = 0; h < heads; ++h)
    kernels->query(shape().type, from + h * shape().d, shape().d, 1, d,
                   narrow ? nullptr : scratch.q + int64_t{h} * d, scratch.q_bf16 + int64_t{h} * d);
  const int first = group * kGroupKeys, keys = std::min(kGroupKeys, query.position + 1 - first);
  const int32_t* pages = args->sequences[static_cast<size_t>(query.sequence)].pages + group * kGroupBlocks;
  std::array<const void*, kGroupBlocks> blocks = {};
  for (int b = 0; b * kKvBlock < keys; ++b)
    blocks[static_cast<size_t>(b)] = cache->keys(args->plane, pages[b], 0);
  kernels->index_scores({.type = shape().type,
                         .heads = heads,
                         .d = d,
                         .q = scratch.q,
                         .q_bf16 = scratch.q_bf16,
                         .weights = args->weights + query.token * args->weight_stride,
                         .k = blocks.data(),
                         .keys = keys,
                         .scratch = scratch.kernel,
                         .scores = to + first});
}

// Groups of pages are claimed one by one; whoever gives the last scores of a query chooses.
void IndexerWork::State::run_wave(size_t first, int count) {
  first_items.assign(1, 0);
  for (int i = 0; i < count; ++i) {
    const int groups = queries[first + static_cast<size_t>(i)].groups();
    left[static_cast<size_t>(i)]->reset(groups);
    first_items.push_back(first_items.back() + groups);
  }
  next.store(0, std::memory_order_relaxed);
  pool->run([&](const Worker& worker) {
    std::byte* const mine = memory.data() + static_cast<size_t>(worker.index) * worker_bytes;
    for (int item; (item = next.fetch_add(1, std::memory_order_relaxed)) < first_items.back();) {
      const auto at =
          static_cast<size_t>(std::ranges::upper_bound(first_items, item) - first_items.begin()) - 1;
      const Query& query = queries[first + at];
      float* const all = reinterpret_cast<float*>(scores.data()) + static_cast<int64_t>(at) * stride;
      score(query, item - first_items[at], all, mine);
      if (!left[at]->arrive()) continue;
      kernels->choose({.scores = all,
                       .count = query.position + 1,
                       .best = args->budget,
                       .seen = args->seen + query.token * args->seen_stride});
    }
  });
}

IndexerWork::IndexerWork(std::shared_ptr<Pool> pool, const Kernels& kernels)
    : state_(std::make_unique<State>()) {
  state_->pool = std::move(pool);
  state_->kernels = kernels.attention;
}
IndexerWork::~IndexerWork() = default;

size_t IndexerWork::bytes_for(const KvShape& shape, int heads, int tokens, int context) const {
  const int wave = std::min(tokens, state_->most_queries());
  const size_t scores =
      static_cast<size_t>(wave) * static_cast<size_t>(score_stride(context)) * sizeof(float);
  const size_t worker = round_up(Scratch(nullptr, shape, heads).bytes, size_t{4096});
  return scores + worker * static_cast<size_t>(state_->pool->threads());
}

void IndexerWork::run(const KvCache& cache, const IndexerArgs& args) {
  State& s = *state_;
  const KvShape& shape = cache.shape(args.plane);
  KT_CHECK(shape.heads == 1 && shape.dv == 0 && !shape.shared, "plane {} holds more than an indexer's keys",
           args.plane);
  KT_CHECK(args.heads > 0 && args.q_stride >= args.heads * shape.d && args.budget > 0, "indexer: {} heads",
           args.heads);
  s.cache = &cache;
  s.args = &args;
  s.list_queries();
  const auto wave = static_cast<size_t>(s.most_queries());
  for (size_t first = 0; first < s.queries.size(); first += wave)
    s.run_wave(first, static_cast<int>(std::min(wave, s.queries.size() - first)));
}

}  // namespace kt::inline nn
