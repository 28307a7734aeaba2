#include "bench/attention_bench.h"

#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "base/error.h"
#include "base/text.h"
#include "bench/random_matrix.h"
#include "nn/indexer.h"
#include "nn/kv_write.h"

namespace kt::inline bench {
namespace {

std::vector<float> random_values(size_t count, uint64_t seed) {
  RandomBits random(seed);
  std::vector<float> out(count);
  for (float& x : out) x = static_cast<float>(2 * random.uniform() - 1);
  return out;
}

KvShape index_shape(const AttentionSetup& setup) {
  return {.d = setup.indexer.dim, .type = setup.shape.type};
}

// Of one layer.
size_t layer_page_bytes(const AttentionSetup& setup) {
  return setup.shape.page_bytes() + (setup.indexer.budget > 0 ? index_shape(setup).page_bytes() : 0);
}

// Layers of the cache: those asked for, or enough to rotate over.
int layers_of(const AttentionSetup& setup, size_t layer_bytes, int context) {
  const uint64_t free = available_memory() / 10 * 9;
  const size_t layers =
      setup.layers ? static_cast<size_t>(setup.layers) : blocks_that_fit(rotation_bytes(), layer_bytes);
  if (checked_mul(layers, layer_bytes, "KV cache") > free)
    fail_as(ErrorKind::kMemory,
            "{} layers of {} sequences with {} tokens need {}, {} are available: try a shorter `context`, a "
            "smaller `batch` or fewer `layers`",
            layers, setup.batch, context, human_bytes(layers * layer_bytes), human_bytes(free));
  return static_cast<int>(layers);
}

// Queries and results of one call, and where its tokens are.
struct CallBuffers {
  CallBuffers(const AttentionSetup& setup, const std::vector<int32_t>& pages, int context, int tokens)
      : q(random_values(rows(setup, tokens) * static_cast<size_t>(setup.shape.d), 5)),
        out(rows(setup, tokens) * static_cast<size_t>(setup.shape.dv)) {
    const size_t each = pages.size() / static_cast<size_t>(setup.batch);
    for (int s = 0; s < setup.batch; ++s)
      sequences.push_back({.first = s * tokens,
                           .count = tokens,
                           .position = context - tokens,
                           .pages = pages.data() + static_cast<size_t>(s) * each});
  }
  static size_t rows(const AttentionSetup& setup, int tokens) {
    return static_cast<size_t>(setup.batch) * static_cast<size_t>(tokens) * static_cast<size_t>(setup.heads);
  }

  std::vector<float> q, out;
  std::vector<AttentionSequence> sequences;
};

// Of an indexer. Heads count for and against a key, as those of models do.
struct IndexBuffers {
  IndexBuffers(const BenchIndexer& indexer, int tokens, int context)
      : heads(indexer.heads),
        dim(indexer.dim),
        stride(seen_words(context)),
        q(random_values(static_cast<size_t>(tokens) * static_cast<size_t>(heads) * static_cast<size_t>(dim),
                        9)),
        weights(random_values(static_cast<size_t>(tokens) * static_cast<size_t>(heads), 10)),
        seen(static_cast<size_t>(tokens) * static_cast<size_t>(stride)) {}
  IndexerArgs args(std::span<const AttentionSequence> sequences, int plane, int budget) {
    return {.plane = plane,
            .sequences = sequences,
            .q = q.data(),
            .q_stride = int64_t{heads} * dim,
            .weights = weights.data(),
            .weight_stride = heads,
            .heads = heads,
            .budget = budget,
            .seen = seen.data(),
            .seen_stride = stride};
  }

  int heads, dim;
  int64_t stride;
  std::vector<float> q, weights;
  std::vector<uint64_t> seen;
};

}  // namespace

int64_t keys_seen(int context, int tokens, int window) {
  int64_t seen = 0;
  for (int position = context - tokens; position < context; ++position)
    seen += window ? std::min(position + 1, window) : position + 1;
  return seen;
}

LimitCall attention_call(const AttentionSetup& setup, int context, int tokens) {
  const KvShape& shape = setup.shape;
  const int64_t keys =
      setup.window ? std::min<int64_t>(context, int64_t{setup.window} + tokens - 1) : context;
  const double token_bytes = static_cast<double>(shape.page_bytes()) / kPageTokens;
  const BenchIndexer& indexer = setup.indexer;
  const bool chosen = chooses(indexer.budget, context - 1);
  // A budget sees as many keys as a window of it, others.
  const auto seen = static_cast<double>(keys_seen(context, tokens, chosen ? indexer.budget : setup.window));
  LimitCall call{.bytes = token_bytes * static_cast<double>(chosen ? indexer.budget : keys) * setup.batch,
                 .operations = 2.0 * (shape.d + shape.dv) * setup.heads * setup.batch * seen};
  if (chosen) {
    const int choosing = std::min(tokens, context - indexer.budget);
    call.bytes += static_cast<double>(index_shape(setup).page_bytes()) / kPageTokens * context * setup.batch;
    call.operations += 2.0 * indexer.heads * indexer.dim * setup.batch *
                       static_cast<double>(keys_seen(context, choosing, 0));
  }
  return call;
}

AttentionBench::AttentionBench(const AttentionSetup& setup, int context) : setup_(setup), context_(context) {
  const int64_t pages = int64_t{setup.batch} * ceil_div(context, kPageTokens);
  if (pages > INT32_MAX)
    fail_as(ErrorKind::kMemory,
            "{} sequences of {} tokens have {} pages, at most {} are counted: try a shorter `context` or a "
            "smaller `batch`",
            setup.batch, context, pages, INT32_MAX);
  check_available(static_cast<double>(pages) * static_cast<double>(layer_page_bytes(setup)),
                  text("a layer of {} sequences with {} tokens", setup.batch, context),
                  "try a shorter `context` or a smaller `batch`");
  layers_ =
      layers_of(setup, checked_mul(static_cast<size_t>(pages), layer_page_bytes(setup), "KV cache"), context);
  SequenceShape shape{.planes = std::vector(static_cast<size_t>(layers_), setup.shape), .states = {}};
  if (setup.indexer.budget > 0)
    shape.planes.insert(shape.planes.end(), static_cast<size_t>(layers_), index_shape(setup));
  cache_ = std::make_unique<KvCache>(shape, static_cast<int>(pages));
  RandomBits random(6);  // pages of a sequence lie anywhere, as after hours of serving
  pages_ = shuffled(static_cast<int>(pages), random);
  fill();
}

// Every page takes a stretch of the same noise from a place of its own: random numbers for gigabytes would
// take longer than the measuring.
void AttentionBench::fill() {
  constexpr uint32_t kPlaces = 4096;
  size_t row = 0;
  for (const KvShape& shape : cache_->shape().planes)
    row = std::max(row, static_cast<size_t>(shape.heads) * static_cast<size_t>(std::max(shape.d, shape.dv)));
  const std::vector<float> noise = random_values(kPageTokens * row + kPlaces, 7);
  const auto pages = static_cast<size_t>(cache_->pages());
  RandomBits random(8);
  for (size_t item = 0; item < cache_->shape().planes.size() * pages; ++item) {
    const auto page = static_cast<int32_t>(item % pages);
    const KvShape& shape = cache_->shape(static_cast<int>(item / pages));
    const AttentionSequence whole{.first = 0, .count = kPageTokens, .position = 0, .pages = &page};
    write_cache(*cache_, *setup_.pool, *setup_.kernels,
                {.plane = static_cast<int>(item / pages),
                 .sequences = {&whole, 1},
                 .k = noise.data() + random.below(kPlaces),
                 .v = noise.data() + random.below(kPlaces),
                 .k_stride = int64_t{shape.heads} * shape.d,
                 .v_stride = int64_t{shape.heads} * shape.dv});
  }
}

void check_attention_call(const AttentionSetup& setup, int tokens) {
  check_available(4.0 * setup.batch * tokens * setup.heads * (setup.shape.d + setup.shape.dv),
                  text("queries and results of {} tokens of {} sequences", tokens, setup.batch),
                  "try fewer `tokens` or a smaller `batch`");
}

LimitFigures AttentionBench::measure(Reader& reader, int tokens, const MeasureFor& time) const {
  KT_CHECK(tokens >= 1 && tokens <= context_, "{} tokens of {}", tokens, context_);
  const KvShape& shape = setup_.shape;
  check_attention_call(setup_, tokens);
  CallBuffers buffers(setup_, pages_, context_, tokens);
  AttentionWork work(setup_.pool, *setup_.kernels);
  const BenchIndexer& indexer = setup_.indexer;
  IndexerWork choosing(setup_.pool, *setup_.kernels);
  IndexBuffers index(indexer, indexer.budget > 0 ? setup_.batch * tokens : 0, context_);
  const bool narrow = shape.type != KvType::kF32 && has_product(*setup_.kernels, Product::kBf16);
  const std::vector<LimitCall> calls(static_cast<size_t>(layers_), attention_call(setup_, context_, tokens));
  return measure_against_limit(
      {.pool = setup_.pool,
       .kernels = setup_.kernels,
       .product = narrow ? Product::kBf16 : Product::kF32,
       .reader = &reader,
       .calls = calls,
       .time = time},
      [&](size_t layer) {
        if (indexer.budget > 0)
          choosing.run(*cache_,
                       index.args(buffers.sequences, layers_ + static_cast<int>(layer), indexer.budget));
        work.run(*cache_, {.plane = static_cast<int>(layer),
                           .sequences = buffers.sequences,
                           .q = buffers.q.data(),
                           .q_stride = int64_t{setup_.heads} * shape.d,
                           .heads = setup_.heads,
                           .scale = 1 / std::sqrt(static_cast<float>(shape.d)),
                           .window = setup_.window,
                           .out = buffers.out.data(),
                           .out_stride = int64_t{setup_.heads} * shape.dv,
                           .seen = indexer.budget > 0 ? index.seen.data() : nullptr,
                           .seen_stride = index.stride,
                           .budget = indexer.budget});
      });
}

}  // namespace kt::inline bench
