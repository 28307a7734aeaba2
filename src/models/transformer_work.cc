// What the steps of a Transformer must read and multiply (work.h).
#include <algorithm>
#include <cmath>

#include "models/transformer_state.h"

namespace kt {
namespace {

Work matrix_work(const Format& format, double stored_bytes, double operations) {
  Work work{.bytes = stored_bytes};
  (is_integer(format.code) ? work.integer_operations : work.float_operations) = operations;
  return work;
}

Work linear_work(const Linear& linear) {
  return matrix_work(linear.format(), linear.stored_bytes(), 2.0 * linear.n() * linear.k());
}

Work times(Work work, double tokens) {  // the weights are read once
  work.integer_operations *= tokens;
  work.float_operations *= tokens;
  return work;
}

}  // namespace

Work Transformer::State::experts_work(const Experts& experts, double hit_experts, double rows) const {
  const double each = 2.0 * experts.shape().hidden * experts.shape().inter;
  const ExpertsOptions& formats = experts.options();
  Work work = matrix_work(formats.gate, hit_experts * experts.stored_bytes_per_expert(), each * rows);
  work += matrix_work(formats.up, 0, each * rows);
  work += matrix_work(formats.down, 0, each * rows);
  return work;
}

void Transformer::State::start_counting() {
  std::vector<int> routing;
  for (size_t i = 0; i < layers.size(); ++i) {
    routed_at.push_back(routing.size());
    if (layers[i].routed) routing.push_back(static_cast<int>(i));
  }
  if (!routing.empty())
    expert_counts = std::make_unique<ExpertCounts>(std::move(routing), spec.moe.experts, spec.moe.top_k);
  for (const LayerWeights& w : layers) {
    for_each_linear(w, [&](const Linear& linear) { dense_work += linear_work(linear); });
    if (w.dense) dense_work += experts_work(*w.dense, 1, 1);
  }
  head_work = linear_work(head);
}

// Keys and values of every position that some new token sees, once; products of each token with what it sees.
Work Transformer::State::attention_work(int layer, int position, int count) const {
  const KvShape shape = kv_shape();
  const LayerSpec& spec_of = spec.layers[static_cast<size_t>(layer)];
  const int heads = spec_of.mla ? spec.mla.heads : spec.gqa.heads;
  const double window = spec_of.window ? spec_of.window : static_cast<double>(position) + count;
  const double read = std::min(static_cast<double>(position) + count, window + count - 1);
  const double seen = std::min(window, position + (count + 1) / 2.0);  // by a token, on average
  const size_t of_head = shape.block_bytes(shape.d) + (shape.shared ? 0 : shape.block_bytes(shape.dv));
  const double each = static_cast<double>(shape.heads) * static_cast<double>(of_head) / kPageTokens;
  return {.bytes = read * each,
          .integer_operations = 0,
          .float_operations = 2.0 * count * seen * heads * (shape.d + shape.dv)};
}

void Transformer::State::count_experts(int layer, int tokens) {
  hit.assign(static_cast<size_t>(spec.moe.experts), 0);
  const auto slots = static_cast<size_t>(tokens) * static_cast<size_t>(spec.moe.top_k);
  for (size_t i = 0; i < slots; ++i)
    if (ids[i] >= 0) hit[static_cast<size_t>(ids[i])] = 1;
  expert_counts->add(routed_at[static_cast<size_t>(layer)], std::span(ids).first(slots));
  const auto experts = static_cast<double>(std::count(hit.begin(), hit.end(), 1));
  total_work += experts_work(*layers[static_cast<size_t>(layer)].routed, experts, static_cast<double>(slots));
}

void Transformer::State::count_step(std::span<const AttentionSequence> sequences, int tokens,
                                    int64_t logit_rows) {
  total_work += times(dense_work, tokens);
  if (logit_rows > 0) total_work += times(head_work, static_cast<double>(logit_rows));
  for (int layer = 0; layer < static_cast<int>(layers.size()); ++layer)
    for (const AttentionSequence& sequence : sequences)
      total_work += attention_work(layer, sequence.position, sequence.count);
}

const Work& Transformer::work() const { return state_->total_work; }
const ExpertCounts* Transformer::expert_counts() const { return state_->expert_counts.get(); }

Work Transformer::decode_work(int sequences, int context) const {
  const State& s = *state_;
  Work work = times(s.dense_work, sequences);
  work += times(s.head_work, sequences);
  for (int layer = 0; layer < static_cast<int>(s.layers.size()); ++layer) {
    Work attention = s.attention_work(layer, context - 1, 1);
    for (int i = 0; i < sequences; ++i) work += attention;
    const LayerWeights& w = s.layers[static_cast<size_t>(layer)];
    if (!w.routed) continue;
    const double experts = s.spec.moe.experts, top_k = s.spec.moe.top_k;
    const double hit = experts * (1 - std::pow(1 - top_k / experts, sequences));
    work += s.experts_work(*w.routed, hit, top_k * sequences);
  }
  return work;
}

}  // namespace kt
