// Puts keys and values of new tokens into the cache.
#pragma once
#include <span>

#include "base/pool.h"
#include "nn/kv_cache.h"

namespace kt::inline nn {

// Keys and values [tokens, heads, d] and [tokens, heads, dv] (f32) for the pages of their sequences.
struct CacheWrite {
  int plane = 0;  // of the cache
  std::span<const AttentionSequence> sequences;
  const float* k = nullptr;
  const float* v = nullptr;  // unused where the plane has none of its own
  int64_t k_stride = 0, v_stride = 0;
};

// Whoever writes the first token of a page clears what an earlier owner left there: attention multiplies
// values that no query sees with zero, and they have to be finite. kS8: each token's numbers of a head are
// rounded to multiples of their largest magnitude / 127.
void write_cache(KvCache& cache, Pool& pool, const Kernels& kernels, const CacheWrite& args);

}  // namespace kt::inline nn
