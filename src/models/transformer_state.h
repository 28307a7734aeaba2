// What building and running a Transformer share; not for other files.
#pragma once
#include <functional>
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

// What matrices of attention multiply, in the order of computing.
enum class AttentionInput : uint8_t {
  kNormed,     // the layer's input after its norm: q, k, v, and latent attention's first halves
  kQueryRank,  // latent attention's query between its two halves: q_b
  kLatent,     // keys and values between theirs: kv_b
  kHeads,      // what attention gives: o
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

// Calls use(linear) for every one the layer has.
template <typename Use>
void for_each_linear(const LayerWeights& w, const Use& use) {
  const auto each = [&](std::initializer_list<const Linear*> linears) {
    for (const Linear* linear : linears)
      if (!linear->empty()) use(*linear);
  };
  if (w.gqa) each({&w.gqa->q, &w.gqa->k, &w.gqa->v, &w.gqa->o});
  if (w.mla) {
    each({&w.mla->q, &w.mla->q_a, &w.mla->q_b, &w.mla->kv_a, &w.mla->o});
    for (const auto* heads : {&w.mla->absorb, &w.mla->expand})
      for (const Linear& linear : *heads) use(linear);
  }
  each({&w.router, &w.shared_gate});
}

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

  // The buffers above, each with the numbers it holds for a token.
  struct FloatBuffer {
    std::vector<float>* buffer;
    int64_t width;
  };
  std::vector<FloatBuffer> float_buffers();
  struct IdBuffer {
    std::vector<int32_t>* buffer;
    int64_t width;
  };
  std::vector<IdBuffer> id_buffers();

  size_t loading_bytes = 0;      // of one worker, the most while weights were read
  size_t expert_bias_bytes = 0;  // of routed experts
  uint64_t embedding_bytes() const;
  KvShape kv_shape() const;
  // Of a step with one token: every layer's linears and dense MLPs, without routed experts and the head.
  Work dense_work, head_work;
  Work total_work;
  std::unique_ptr<ExpertCounts> expert_counts;  // null: no layer routes
  std::vector<size_t> routed_at;                // [layers] index in expert_counts->layers()
  std::vector<uint8_t> hit;                     // [experts], scratch of count_experts

  // What any number of layers needs to run, after spec and options.
  void prepare(std::shared_ptr<Pool> workers);
  void start_counting();
  Work experts_work(const Experts& experts, double hit_experts, double rows) const;
  Work attention_work(int layer, int position, int count) const;  // of one sequence
  void count_experts(int layer, int tokens);                      // after route()
  void count_step(std::span<const AttentionSequence> sequences, int tokens, int64_t logit_rows);

  // Where set, called with what attention's matrices are about to multiply, rows `stride` apart; true: the
  // rest of attention is left out.
  std::function<bool(AttentionInput, const float* x, int64_t stride)> watch;
  bool seen(AttentionInput input, const std::vector<float>& rows, int64_t stride) const {
    return watch && watch(input, rows.data(), stride);
  }

  void run(int m, std::initializer_list<LinearCall> calls);
  void attend_gqa(int layer, KvCache& cache, std::span<const AttentionSequence> sequences, int tokens);
  void attend_mla(int layer, KvCache& cache, std::span<const AttentionSequence> sequences, int tokens);
  void feed_forward(int layer, int tokens);
  const float* dense_scale(const LayerWeights& w, int tokens);  // [tokens] factors of what `dense` gives
  void dense_feed_forward(const LayerWeights& w, int tokens);   // normed through the layer's `dense`, to x
  void route(const LayerWeights& weights, int tokens);
  void norm(const std::vector<float>& weight, int tokens);          // x to normed
  void add(int tokens);                                             // out to x
  void add_and_norm(const std::vector<float>& weight, int tokens);  // out to x, x to normed
};

}  // namespace kt
