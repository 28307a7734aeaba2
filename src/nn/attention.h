// Causal softmax attention over a paged cache, for a batch of sequences that each bring one or many new
// tokens. Grouped heads, sliding windows, sinks; latent attention is the same with one shared head. No
// projections, no positions. Where an indexer has chosen keys, others are neither read nor multiplied.
#pragma once
#include <cstdint>
#include <memory>
#include <span>

#include "base/pool.h"
#include "nn/indexer.h"
#include "nn/kv_cache.h"

namespace kt::inline nn {

struct AttentionArgs {
  int plane = 0;  // of the cache
  std::span<const AttentionSequence> sequences;
  const float* q = nullptr;  // [tokens, heads, d]
  int64_t q_stride = 0;      // between tokens
  int heads = 0;             // a multiple of the cache's heads
  float scale = 1;           // of q . k
  int window = 0;            // positions a token sees, its own included; 0: all
  int chunk = 0;  // a token at t sees j only where t / chunk == j / chunk; 0: all. Not with a window
  const float* sinks = nullptr;  // [heads] or null: a score that takes part in the sum and has no value
  float* out = nullptr;          // [tokens, heads, dv]
  int64_t out_stride = 0;
  // Of tokens that choose (nn/indexer.h): which keys they see, `budget` of them, without a window.
  const uint64_t* seen = nullptr;  // [tokens, seen_stride]; null: every key
  int64_t seen_stride = 0;
  int budget = 0;
};

// Results are bitwise the same for any number of threads, any batch and any split of a sequence into steps:
// a row's keys are summed in groups of pages that lie at fixed places, and groups are joined in
// order. Chosen keys are brought together first, in the order of their positions, and are summed as if they were the
// only ones: a choice of all keys gives what all keys give.
class AttentionWork {
 public:
  AttentionWork(std::shared_ptr<Pool> pool, const Kernels& kernels);
  ~AttentionWork();
  // The new tokens' keys and values are in the cache already.
  // While workers wait for the next task they fetch what `then` says.
  void run(const KvCache& cache, const AttentionArgs& args, const Forecast* then = nullptr);
  // Keys and values that this worker will read first when the next run is over another plane of the same cache, else as
  // the last one was. Sequences are that run's.
  Ahead first_read(const KvCache& cache, int plane, std::span<const AttentionSequence> sequences,
                   const Worker& worker) const;
  // What it takes, at most, when that many sequences have this many keys each; with a budget keys are chosen.
  size_t bytes_for(const KvShape& shape, int heads, int sequences, int context, int budget = 0) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kt::inline nn
