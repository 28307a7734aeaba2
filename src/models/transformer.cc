#include "models/transformer.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/error.h"
#include "models/transformer_state.h"
#include "nn/kv_write.h"
#include "nn/norm.h"

namespace kt {
namespace {

constexpr int kRowsAtOnce = 4;  // below this many tokens, work on single rows is not worth waking the others

// Calls work(row) for rows [0, n), on all workers where there are enough.
template <typename Work>
void for_rows(Pool& pool, int n, const Work& work) {
  if (n < kRowsAtOnce) {
    for (int i = 0; i < n; ++i) work(i);
    return;
  }
  pool.run([&](const Worker& worker) {
    for (int i = worker.index; i < n; i += pool.threads()) work(i);
  });
}

// The last so many new tokens of a sequence get logits.
int logit_tokens(const SequenceInput& input) {
  const int count = static_cast<int>(input.tokens.size());
  switch (input.logits) {
    case SequenceInput::Logits::kNone:
      return 0;
    case SequenceInput::Logits::kLast:
      return std::min(count, 1);
    case SequenceInput::Logits::kAll:
      return count;
  }
  return 0;
}

}  // namespace

void Transformer::State::run(int m, std::initializer_list<LinearCall> calls) {
  linears->run(m, {calls.begin(), calls.size()});
}

void Transformer::State::norm(const std::vector<float>& weight, int tokens) {
  for_rows(*pool, tokens, [&](int t) {
    rms_norm(x.data() + int64_t{t} * spec.hidden, weight.data(), spec.norm_eps, spec.hidden,
             normed.data() + int64_t{t} * spec.hidden);
  });
}

void Transformer::State::add(int tokens) {
  for_rows(*pool, tokens, [&](int t) {
    kernels->add_scaled(x.data() + int64_t{t} * spec.hidden, out.data() + int64_t{t} * spec.hidden, 1.0f,
                        spec.hidden);
  });
}

void Transformer::State::add_and_norm(const std::vector<float>& weight, int tokens) {
  for_rows(*pool, tokens, [&](int t) {
    float* row = x.data() + int64_t{t} * spec.hidden;
    kernels->add_scaled(row, out.data() + int64_t{t} * spec.hidden, 1.0f, spec.hidden);
    rms_norm(row, weight.data(), spec.norm_eps, spec.hidden, normed.data() + int64_t{t} * spec.hidden);
  });
}

void Transformer::State::attend_gqa(int layer, KvCache& cache, std::span<const AttentionSequence> sequences,
                                    int tokens) {
  const GqaSpec& gqa = spec.gqa;
  const GqaWeights& w = *layers[static_cast<size_t>(layer)].gqa;
  const int64_t q_width = int64_t{gqa.heads} * gqa.head_dim, kv_width = int64_t{gqa.kv_heads} * gqa.head_dim;
  if (seen(AttentionInput::kNormed, normed, spec.hidden)) return;
  run(tokens, {{&w.q, normed.data(), spec.hidden, q.data(), q_width},
               {&w.k, normed.data(), spec.hidden, k.data(), kv_width},
               {&w.v, normed.data(), spec.hidden, v.data(), kv_width}});
  const auto norm_heads = [&](float* row, const std::vector<float>& weight, int count) {
    if (weight.empty()) return;
    const bool all = gqa.norm == GqaSpec::Norm::kAll;
    const int size = all ? count * gqa.head_dim : gqa.head_dim;
    for (int h = 0; h < (all ? 1 : count); ++h)
      rms_norm(row + h * size, weight.data(), spec.norm_eps, size, row + h * size);
  };
  for_rows(*pool, tokens, [&](int t) {
    float *q_row = q.data() + t * q_width, *k_row = k.data() + t * kv_width;
    norm_heads(q_row, w.q_norm, gqa.heads);
    norm_heads(k_row, w.k_norm, gqa.kv_heads);
    const int position = positions[static_cast<size_t>(t)];
    rope->turn(q_row, gqa.heads, gqa.head_dim, position);
    rope->turn(k_row, gqa.kv_heads, gqa.head_dim, position);
  });
  write_cache(cache, *pool, *kernels,
              {.layer = layer,
               .sequences = sequences,
               .k = k.data(),
               .v = v.data(),
               .k_stride = kv_width,
               .v_stride = kv_width});
  attention->run(cache, {.layer = layer,
                         .sequences = sequences,
                         .q = q.data(),
                         .q_stride = q_width,
                         .heads = gqa.heads,
                         .scale = static_cast<float>(spec.softmax_scale),
                         .window = spec.layers[static_cast<size_t>(layer)].window,
                         .sinks = w.sinks.empty() ? nullptr : w.sinks.data(),
                         .out = heads.data(),
                         .out_stride = q_width});
  if (seen(AttentionInput::kHeads, heads, q_width)) return;
  run(tokens, {{&w.o, heads.data(), q_width, out.data(), spec.hidden}});
}

void Transformer::State::attend_mla(int layer, KvCache& cache, std::span<const AttentionSequence> sequences,
                                    int tokens) {
  const MlaSpec& mla = spec.mla;
  const MlaWeights& w = *layers[static_cast<size_t>(layer)].mla;
  const int64_t head = mla.nope + mla.rope, q_width = mla.heads * head, kv_width = mla.kv_rank + mla.rope,
                absorbed = mla.heads * kv_width, context = int64_t{mla.heads} * mla.kv_rank,
                out_width = int64_t{mla.heads} * mla.v;
  if (seen(AttentionInput::kNormed, normed, spec.hidden)) return;
  if (mla.q_rank > 0) {
    run(tokens, {{&w.q_a, normed.data(), spec.hidden, v.data(), mla.q_rank},
                 {&w.kv_a, normed.data(), spec.hidden, k.data(), kv_width}});
    for_rows(*pool, tokens, [&](int t) {
      float* row = v.data() + int64_t{t} * mla.q_rank;
      rms_norm(row, w.q_a_norm.data(), mla.norm_eps, mla.q_rank, row);
    });
    if (seen(AttentionInput::kQueryRank, v, mla.q_rank)) return;
    run(tokens, {{&w.q_b, v.data(), mla.q_rank, q.data(), q_width}});
  } else {
    run(tokens, {{&w.q, normed.data(), spec.hidden, q.data(), q_width},
                 {&w.kv_a, normed.data(), spec.hidden, k.data(), kv_width}});
  }
  for_rows(*pool, tokens, [&](int t) {
    float* row = k.data() + t * kv_width;
    rms_norm(row, w.kv_a_norm.data(), mla.norm_eps, mla.kv_rank, row);
    const int position = positions[static_cast<size_t>(t)];
    rope->turn(q.data() + t * q_width + mla.nope, mla.heads, head, position);
    rope->turn(row + mla.kv_rank, 1, 0, position);
  });
  if (seen(AttentionInput::kLatent, k, kv_width)) return;
  write_cache(cache, *pool, *kernels,
              {.layer = layer, .sequences = sequences, .k = k.data(), .k_stride = kv_width});
  // q . k = (absorbed q) . (latent): the keys' half of kv_b moves to the side of the query.
  std::vector<LinearCall> calls;
  for (int h = 0; h < mla.heads; ++h)
    calls.push_back({&w.absorb[static_cast<size_t>(h)], q.data() + h * head, q_width,
                     latent.data() + h * kv_width, absorbed});
  linears->run(tokens, calls);
  for_rows(*pool, tokens, [&](int t) {
    for (int h = 0; h < mla.heads; ++h)
      std::copy_n(q.data() + t * q_width + h * head + mla.nope, mla.rope,
                  latent.data() + t * absorbed + h * kv_width + mla.kv_rank);
  });
  attention->run(cache, {.layer = layer,
                         .sequences = sequences,
                         .q = latent.data(),
                         .q_stride = absorbed,
                         .heads = mla.heads,
                         .scale = static_cast<float>(spec.softmax_scale),
                         .window = spec.layers[static_cast<size_t>(layer)].window,
                         .out = heads.data(),
                         .out_stride = context});
  calls.clear();
  for (int h = 0; h < mla.heads; ++h)
    calls.push_back({&w.expand[static_cast<size_t>(h)], heads.data() + int64_t{h} * mla.kv_rank, context,
                     q.data() + int64_t{h} * mla.v, out_width});
  linears->run(tokens, calls);
  if (seen(AttentionInput::kHeads, q, out_width)) return;
  run(tokens, {{&w.o, q.data(), out_width, out.data(), spec.hidden}});
}

void Transformer::State::route(const LayerWeights& w, int tokens) {
  const MoeSpec& moe = spec.moe;
  run(tokens, {{&w.router, normed.data(), spec.hidden, router_logits.data(), moe.experts}});
  for_rows(*pool, tokens, [&](int t) {
    choose_experts(moe.router, moe.experts, moe.top_k, router_logits.data() + int64_t{t} * moe.experts,
                   w.correction.empty() ? nullptr : w.correction.data(), ids.data() + int64_t{t} * moe.top_k,
                   weights.data() + int64_t{t} * moe.top_k);
  });
}

void Transformer::State::feed_forward(int layer, int tokens) {
  LayerWeights& w = layers[static_cast<size_t>(layer)];
  if (w.routed) {
    route(w, tokens);
    count_experts(layer, tokens);
    const auto start = std::chrono::steady_clock::now();
    w.routed->forward({.tokens = tokens,
                       .top_k = spec.moe.top_k,
                       .input = normed.data(),
                       .ids = ids.data(),
                       .weights = weights.data(),
                       .output = out.data()});
    expert_counts->add_time(static_cast<uint64_t>((std::chrono::steady_clock::now() - start).count()));
    add(tokens);
  }
  if (w.dense) dense_feed_forward(w, tokens);
}

const float* Transformer::State::dense_scale(const LayerWeights& w, int tokens) {
  if (w.shared_gate.empty()) return ones.data();
  run(tokens, {{&w.shared_gate, normed.data(), spec.hidden, gate.data(), 1}});
  for (int t = 0; t < tokens; ++t)
    gate[static_cast<size_t>(t)] = 1 / (1 + std::exp(-gate[static_cast<size_t>(t)]));
  return gate.data();
}

void Transformer::State::dense_feed_forward(const LayerWeights& w, int tokens) {
  w.dense->forward({.tokens = tokens,
                    .top_k = 1,
                    .input = normed.data(),
                    .ids = zeros.data(),
                    .weights = dense_scale(w, tokens),
                    .output = out.data()});
  add(tokens);
}

Transformer::~Transformer() = default;
Transformer::Transformer(Transformer&&) noexcept = default;

const ModelSpec& Transformer::spec() const { return state_->spec; }
int Transformer::max_tokens() const { return state_->options.max_tokens; }
Pool& Transformer::pool() const { return *state_->pool; }

KvShape Transformer::kv_shape() const { return state_->kv_shape(); }

KvShape Transformer::State::kv_shape() const {
  KvShape shape{.layers = static_cast<int>(spec.layers.size()), .type = options.kv_type};
  if (spec.layers.front().mla) {
    shape.d = spec.mla.kv_rank + spec.mla.rope;
    shape.dv = spec.mla.kv_rank;
    shape.shared = true;
  } else {
    shape.heads = spec.gqa.kv_heads;
    shape.d = shape.dv = spec.gqa.head_dim;
  }
  return shape;
}

int64_t Transformer::logit_rows(std::span<const SequenceInput> inputs) {
  int64_t rows = 0;
  for (const SequenceInput& input : inputs) rows += logit_tokens(input);
  return rows;
}

void Transformer::forward(KvCache& cache, std::span<const SequenceInput> inputs, float* logits) {
  State& s = *state_;
  KT_CHECK(!s.options.sizes_only, "a model without weights");
  const Pool::Burst burst(*s.pool);
  std::vector<AttentionSequence> sequences;
  int tokens = 0;
  for (const SequenceInput& input : inputs) {
    if (input.tokens.empty()) continue;
    const int count = static_cast<int>(input.tokens.size());
    if (input.position < 0 || input.position + count > s.spec.context)
      fail("positions {} to {}: the model's context is {} tokens", input.position, input.position + count,
           s.spec.context);
    if (tokens + count > s.options.max_tokens)
      fail("{} tokens in one step, at most {} fit", tokens + count, s.options.max_tokens);
    for (const int32_t id : input.tokens)
      if (id < 0 || id >= s.spec.vocab) fail("token {}: the vocabulary has {}", id, s.spec.vocab);
    for_rows(*s.pool, count, [&](int t) {
      s.embedding->values(input.tokens[static_cast<size_t>(t)], 1,
                          s.x.data() + int64_t{tokens + t} * s.spec.hidden);
    });
    for (int t = 0; t < count; ++t) s.positions[static_cast<size_t>(tokens + t)] = input.position + t;
    sequences.push_back({.first = tokens, .count = count, .position = input.position, .pages = input.pages});
    tokens += count;
  }
  if (tokens == 0) return;
  for (int layer = 0; layer < static_cast<int>(s.layers.size()); ++layer) {
    const LayerWeights& w = s.layers[static_cast<size_t>(layer)];
    s.norm(w.input_norm, tokens);
    if (w.mla) {
      s.attend_mla(layer, cache, sequences, tokens);
    } else {
      s.attend_gqa(layer, cache, sequences, tokens);
    }
    s.add_and_norm(w.post_norm, tokens);
    s.feed_forward(layer, tokens);
  }
  s.count_step(sequences, tokens, logit_rows(inputs));
  if (logit_rows(inputs) == 0) return;
  s.norm(s.final_norm, tokens);
  // Rows whose logits are wanted move together; the rest of `normed` is not needed any more.
  int64_t rows = 0;
  size_t at = 0;
  for (const SequenceInput& input : inputs) {
    if (input.tokens.empty()) continue;
    const AttentionSequence& sequence = sequences[at++];
    for (int t = sequence.count - logit_tokens(input); t < sequence.count; ++t, ++rows)
      std::copy_n(s.normed.data() + int64_t{sequence.first + t} * s.spec.hidden, s.spec.hidden,
                  s.normed.data() + rows * s.spec.hidden);
  }
  s.run(static_cast<int>(rows), {{&s.head, s.normed.data(), s.spec.hidden, logits, s.spec.vocab}});
}

}  // namespace kt
