// The memory a model takes, before any of it is taken: a Transformer built for its sizes only
// (CpuOpsOptions::sizes_only) asks the same objects that will hold the bytes how many they are.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nn/place.h"

namespace kt::inline models {

struct MemoryRequest {
  int sequences = 1;   // at once
  int context = 1024;  // tokens of each, prompt and answer; a step takes as many as the model's max_tokens
  // Bytes for snapshots of states, where the model keeps states; none: an eighth of the pages', and two for each
  // sequence at least, of its prompt and of its answer: without them no second turn would find its first.
  std::optional<uint64_t> snapshots = 0;
};

// Bytes in one place. What is bound to no node of the host counts for the host as a whole.
struct PlaceMemory {
  Place place;
  uint64_t experts = 0;    // routed experts, packed
  uint64_t linears = 0;    // all other matrices, packed
  uint64_t vectors = 0;    // norms and biases
  uint64_t kv_cache = 0;   // pages and states for every sequence
  uint64_t workspace = 0;  // activations, quantised rows, scratch of the workers, logits
  uint64_t loading = 0;    // pieces in plain order while weights are read; gone before the first step

  uint64_t weights() const { return experts + linears + vectors; }
  PlaceMemory& operator+=(const PlaceMemory& other);  // the place stays
};

struct MemoryPlan {
  std::vector<PlaceMemory> places;  // each once
  uint64_t embedding = 0;           // rows are read from the file where it is mapped: not in the sums

  PlaceMemory& at(const Place& place);  // nothing yet, where there was none so far
  PlaceMemory host() const;             // all its nodes
  uint64_t weights() const { return host().weights(); }
  uint64_t running() const;                       // on the host
  uint64_t peak() const;                          // the larger of loading and running
  std::vector<uint64_t> weights_of_node() const;  // experts and linears of each
};

// One line for people: the host's parts from the largest down, "experts 1.2 GiB, KV cache 300 MiB".
std::string largest_parts(const MemoryPlan& plan, int most = 3);

}  // namespace kt::inline models
