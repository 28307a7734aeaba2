#include "models/memory_plan.h"

#include <algorithm>

#include "base/checked.h"
#include "base/text.h"
#include "models/transformer_state.h"

namespace kt {
namespace {

// The steps of a forward that use LinearWork; calls that read the same rows have the same x.
class LinearSteps {
 public:
  explicit LinearSteps(const LinearWork& work) : work_(work) {}

  void add(int rows, std::initializer_list<const Linear*> same_rows) {
    std::vector<LinearCall> calls;
    for (const Linear* linear : same_rows)
      if (!linear->empty()) calls.push_back({.linear = linear, .x = &rows_});
    add(rows, calls);
  }
  void add_heads(int rows, const std::vector<Linear>& heads) {
    std::vector<float> each(heads.size());
    std::vector<LinearCall> calls;
    for (size_t h = 0; h < heads.size(); ++h) calls.push_back({.linear = &heads[h], .x = &each[h]});
    add(rows, calls);
  }
  size_t bytes() const { return most_.rows + most_.workers; }

 private:
  void add(int rows, const std::vector<LinearCall>& calls) {
    const LinearWork::Bytes bytes = work_.bytes_for(rows, calls);
    most_.rows = std::max(most_.rows, bytes.rows);
    most_.workers = std::max(most_.workers, bytes.workers);
  }

  const LinearWork& work_;
  LinearWork::Bytes most_;
  float rows_ = 0;
};

size_t linear_bytes(const LinearWork& work, const std::vector<LayerWeights>& layers, const Linear& head,
                    int tokens, int logit_rows) {
  LinearSteps steps(work);
  for (const LayerWeights& w : layers) {
    if (w.gqa) {
      steps.add(tokens, {&w.gqa->q, &w.gqa->k, &w.gqa->v});
      steps.add(tokens, {&w.gqa->o});
    }
    if (w.mla) {
      steps.add(tokens, {&w.mla->q, &w.mla->q_a, &w.mla->kv_a});
      steps.add(tokens, {&w.mla->q_b});
      steps.add_heads(tokens, w.mla->absorb);
      steps.add_heads(tokens, w.mla->expand);
      steps.add(tokens, {&w.mla->o});
    }
    steps.add(tokens, {&w.router});
    steps.add(tokens, {&w.shared_gate});
  }
  steps.add(logit_rows, {&head});
  return steps.bytes();
}

size_t vector_bytes(const LayerWeights& w) {
  size_t floats = w.input_norm.size() + w.post_norm.size() + w.correction.size();
  if (w.gqa) floats += w.gqa->q_norm.size() + w.gqa->k_norm.size() + w.gqa->sinks.size();
  if (w.mla) floats += w.mla->q_a_norm.size() + w.mla->kv_a_norm.size();
  size_t bytes = floats * sizeof(float);
  for_each_linear(w, [&](const Linear& linear) { bytes += linear.bias_bytes(); });
  return bytes;
}

}  // namespace

uint64_t MemoryPlan::peak() const { return std::max(weights() + loading, running()); }

std::string largest_parts(const MemoryPlan& plan, int most) {
  struct Part {
    const char* name;
    uint64_t bytes;
  };
  std::vector<Part> parts = {{"experts", plan.experts},
                             {"dense weights", plan.linears + plan.vectors},
                             {"KV cache", plan.kv_cache},
                             {"workspace", plan.workspace},
                             {"loading", plan.loading}};
  std::ranges::sort(parts, std::greater{}, &Part::bytes);
  std::string out;
  for (int i = 0; i < most; ++i) {
    const Part& part = parts[static_cast<size_t>(i)];
    if (part.bytes) out += text("{}{} {}", out.empty() ? "" : ", ", part.name, human_bytes(part.bytes));
  }
  return out;
}

MemoryPlan Transformer::memory_plan(const MemoryRequest& request) const {
  State& s = *state_;
  MemoryPlan plan;
  plan.weights_of_node.resize(static_cast<size_t>(s.pool->nodes()));
  const auto add = [&](uint64_t& sum, const auto& weights) {
    sum += weights.packed_bytes();
    for (int node = 0; node < s.pool->nodes(); ++node)
      plan.weights_of_node[static_cast<size_t>(node)] += weights.packed_bytes(node);
  };
  const int tokens = static_cast<int>(
      std::clamp<int64_t>(int64_t{request.context} * request.sequences, 1, int64_t{s.options.max_tokens}));
  size_t forward = 0;
  add(plan.linears, s.head);
  for (const LayerWeights& w : s.layers) {
    for_each_linear(w, [&](const Linear& linear) { add(plan.linears, linear); });
    if (w.dense) add(plan.linears, *w.dense);
    if (w.routed) add(plan.experts, *w.routed);
    if (w.dense) forward = std::max(forward, w.dense->forward_bytes(tokens, 1));
    if (w.routed) forward = std::max(forward, w.routed->forward_bytes(tokens, s.spec.moe.top_k));
    plan.vectors += vector_bytes(w);
  }
  plan.vectors += s.final_norm.size() * sizeof(float) + s.expert_bias_bytes;
  plan.embedding = s.embedding_bytes();
  const KvShape kv = kv_shape();
  const int64_t pages = ceil_div(int64_t{request.context}, kPageTokens) * request.sequences;
  plan.kv_cache = static_cast<uint64_t>(pages) * static_cast<uint64_t>(kv.layers) * kv.page_bytes();
  const int heads = s.spec.layers.front().mla ? s.spec.mla.heads : s.spec.gqa.heads;
  plan.workspace =
      forward + linear_bytes(*s.linears, s.layers, s.head, tokens, request.sequences) +
      s.attention->bytes_for(kv, heads, request.sequences, request.context) +
      static_cast<uint64_t>(request.sequences) * static_cast<uint64_t>(s.spec.vocab) * sizeof(float);
  int64_t width = 0;
  for (const auto& [buffer, numbers] : s.float_buffers()) width += numbers;
  for (const auto& [buffer, numbers] : s.id_buffers()) width += numbers;
  plan.workspace += static_cast<uint64_t>(width * s.options.max_tokens) * sizeof(float);
  plan.loading = s.loading_bytes * static_cast<uint64_t>(s.pool->threads());
  return plan;
}

}  // namespace kt
