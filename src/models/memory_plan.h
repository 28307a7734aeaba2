// The memory a model takes, before any of it is taken: a Transformer built for its sizes only
// (TransformerOptions::sizes_only) asks the same objects that will hold the bytes how many they are.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kt {

struct MemoryRequest {
  int sequences = 1;   // at once
  int context = 1024;  // tokens of each, prompt and answer; a step takes as many as the model's max_tokens
};

// Bytes.
struct MemoryPlan {
  uint64_t experts = 0;    // routed experts, packed
  uint64_t linears = 0;    // all other matrices, packed
  uint64_t vectors = 0;    // norms and biases
  uint64_t kv_cache = 0;   // pages for every sequence
  uint64_t workspace = 0;  // activations, quantised rows, scratch of the workers, logits
  uint64_t loading = 0;    // pieces in plain order while weights are read; gone before the first step
  uint64_t embedding = 0;  // rows are read from the file where it is mapped: not in the sums
  std::vector<uint64_t> weights_of_node;  // experts and linears by NUMA node of the pool

  uint64_t weights() const { return experts + linears + vectors; }
  uint64_t running() const { return weights() + kv_cache + workspace; }
  uint64_t peak() const;  // the larger of loading and running
};

// One line for people: the parts from the largest down, "experts 1.2 GiB, KV cache 300 MiB".
std::string largest_parts(const MemoryPlan& plan, int most = 3);

}  // namespace kt
