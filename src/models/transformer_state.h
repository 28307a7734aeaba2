// What building and running a Transformer share; not for other files.
#pragma once
#include <optional>
#include <vector>

#include "models/transformer.h"
#include "nn/attention.h"
#include "nn/experts.h"
#include "nn/linear.h"

namespace kt {

struct GqaWeights {
  Linear q, k, v, o;
  std::vector<float> q_norm, k_norm, sinks;  // empty: none
};

struct MlaWeights {
  Linear q, q_a, q_b, kv_a, o;  // q, or q_a and q_b
  std::vector<float> q_a_norm, kv_a_norm;
  std::vector<Linear> absorb;  // [heads] nope -> kv_rank: keys' half of kv_b, transposed
  std::vector<Linear> expand;  // [heads] kv_rank -> v
};

struct LayerWeights {
  std::vector<float> input_norm, post_norm;
  std::optional<GqaWeights> gqa;
  std::optional<MlaWeights> mla;
  std::optional<Experts>
      dense;  // a dense layer's own, or the shared expert: one expert that every token visits
  std::optional<Experts> routed;
  Linear router, shared_gate;
  std::vector<float> correction;  // [experts] or empty
};

struct Transformer::State {
  ModelSpec spec;
  TransformerOptions options;
  std::shared_ptr<Pool> pool;
  std::shared_ptr<Workspace> workspace;
  const Kernels* kernels = nullptr;
  std::unique_ptr<StoredMatrix> embedding;  // rows are read as tokens need them
  std::unique_ptr<Rope> rope;
  std::vector<float> final_norm;
  Linear head;
  std::vector<LayerWeights> layers;
  std::unique_ptr<LinearWork> linears;
  std::unique_ptr<AttentionWork> attention;

  // Of one forward, [tokens, ...]; grown once to max_tokens.
  std::vector<float> x, normed, q, k, v, latent, heads, out;
  std::vector<float> router_logits, weights, ones, gate;
  std::vector<int32_t> ids, zeros, positions;

  void run(int m, std::initializer_list<LinearCall> calls);
  void attend_gqa(int layer, KvCache& cache, std::span<const AttentionSequence> sequences, int tokens);
  void attend_mla(int layer, KvCache& cache, std::span<const AttentionSequence> sequences, int tokens);
  void feed_forward(int layer, int tokens);
  void route(const LayerWeights& weights, int tokens);
  void norm(const std::vector<float>& weight, int tokens);          // x to normed
  void add(int tokens);                                             // out to x
  void add_and_norm(const std::vector<float>& weight, int tokens);  // out to x, x to normed
};

}  // namespace kt
