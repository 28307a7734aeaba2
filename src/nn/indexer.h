// Which keys the queries of a step attend to: an indexer scores all that a query sees, and the best are chosen. Keys
// are those of a plane of the cache that has no values. No projections, no positions, no attention.
#pragma once
#include <cstdint>
#include <memory>
#include <span>

#include "base/pool.h"
#include "nn/kv_cache.h"

namespace kt::inline nn {

// Words of a query: a bit for each key, one for each page.
constexpr int64_t seen_words(int64_t context) { return (context + kPageTokens - 1) / kPageTokens; }
// A query that sees no more keys than the budget attends to all of them, and nobody chooses.
constexpr bool chooses(int budget, int position) { return budget > 0 && position >= budget; }

struct IndexerArgs {
  int plane = 0;  // of the cache
  std::span<const AttentionSequence> sequences;
  const float* q = nullptr;        // [tokens, heads, d]
  int64_t q_stride = 0;            // between tokens
  const float* weights = nullptr;  // [tokens, heads]
  int64_t weight_stride = 0;
  int heads = 0;
  int budget = 0;
  uint64_t* seen = nullptr;  // [tokens, seen_stride] out; words of tokens that choose
  int64_t seen_stride = 0;
};

// Results are the same for any number of threads, any batch and any split of a sequence into steps.
class IndexerWork {
 public:
  IndexerWork(std::shared_ptr<Pool> pool, const Kernels& kernels);
  ~IndexerWork();
  // The new tokens' keys are in the cache already.
  void run(const KvCache& cache, const IndexerArgs& args);
  // What it takes, at most, when so many tokens come in a step and a sequence has this many keys.
  size_t bytes_for(const KvShape& shape, int heads, int tokens, int context) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kt::inline nn
