// Attention over a cache of random keys and values against the machine's limit: layers take turns, so that no
// cache of the CPU holds the next one; the measuring is in limit_bench.h.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "bench/limit_bench.h"
#include "nn/attention.h"

namespace kt::inline bench {

// An indexer that chooses the keys which attention sees.
struct BenchIndexer {
  int budget = 0;  // 0: there is none
  int heads = 32, dim = 128;
};

struct AttentionSetup {
  std::shared_ptr<Pool> pool;
  const Kernels* kernels = nullptr;
  int heads = 0;  // of queries; a multiple of the cache's heads
  KvShape shape;
  int layers = 0;             // 0: enough that no cache holds them, as far as memory goes
  int batch = 1;              // sequences, all alike
  int window = 0;             // positions a token sees, its own included; 0: all
  BenchIndexer indexer = {};  // without a window; its scores and its choice are part of the call
};

// Keys that the last `tokens` positions of a context see in all: a token sees itself and what is before it.
int64_t keys_seen(int context, int tokens, int window);
// What one call must read and multiply: the keys and values that any of its tokens sees, once for each
// sequence, in the cache's type and without padding; 2 (d + dv) operations for each query row and key. With an indexer
// its keys and products too, and of the others those that the last token is left with.
LimitCall attention_call(const AttentionSetup& setup, int context, int tokens);

// A filled cache for one length of context.
// Error (kMemory) where queries and results of a call with so many tokens of each sequence do not fit: asked before a
// cache is filled for it.
void check_attention_call(const AttentionSetup& setup, int tokens);

class AttentionBench {
 public:
  // Error(kMemory) with the bytes needed and available.
  AttentionBench(const AttentionSetup& setup, int context);

  int layers() const { return layers_; }
  size_t bytes() const { return cache_->bytes(); }
  int context() const { return context_; }

  // New tokens are the last of each sequence: 1 <= tokens <= context.
  LimitFigures measure(Reader& reader, int tokens, const MeasureFor& time) const;

 private:
  void fill();

  AttentionSetup setup_;
  int context_, layers_ = 0;
  std::vector<int32_t> pages_;  // [batch, pages of the context]
  std::unique_ptr<KvCache> cache_;
};

}  // namespace kt::inline bench
