// Causal softmax attention over a paged cache, for a batch of sequences that each bring one or many new
// tokens. Grouped heads, sliding windows, sinks; latent attention is the same with one shared head. No
// projections, no positions.
#pragma once
#include <cstdint>
#include <memory>
#include <span>

#include "base/pool.h"
#include "nn/kv_cache.h"

namespace kt {

// New tokens of one sequence: rows [first, first + count) of the batch, at positions [position, position +
// count). Their keys and values are in the cache already.
struct AttentionSequence {
  int first = 0, count = 0, position = 0;
  const int32_t* pages = nullptr;  // page of tokens 0..63, 64..127, ...
};

struct AttentionArgs {
  int layer = 0;
  std::span<const AttentionSequence> sequences;
  const float* q = nullptr;      // [tokens, heads, d]
  int64_t q_stride = 0;          // between tokens
  int heads = 0;                 // a multiple of the cache's heads
  float scale = 1;               // of q . k
  int window = 0;                // positions a token sees, its own included; 0: all
  const float* sinks = nullptr;  // [heads] or null: a score that takes part in the sum and has no value
  float* out = nullptr;          // [tokens, heads, dv]
  int64_t out_stride = 0;
};

// Writes new keys and values [tokens, heads, d] and [tokens, heads, dv] (f32) into the pages of their
// sequences.
struct CacheWrite {
  int layer = 0;
  std::span<const AttentionSequence> sequences;
  const float* k = nullptr;
  const float* v = nullptr;  // unused where the cache shares them
  int64_t k_stride = 0, v_stride = 0;
};
void write_cache(KvCache& cache, const Kernels& kernels, const CacheWrite& args);

// Results are bitwise the same for any number of threads and any company in the batch: a sequence's keys are
// summed in page order, in splits of a fixed length.
class AttentionWork {
 public:
  AttentionWork(std::shared_ptr<Pool> pool, const Kernels& kernels);
  ~AttentionWork();
  void run(const KvCache& cache, const AttentionArgs& args);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kt
