#include "models/layer_walk.h"

#include <algorithm>
#include <numeric>

#include "models/transformer_loader.h"

namespace kt {

LayerWalk::LayerWalk(const Checkpoint& checkpoint, ModelSpec spec, std::shared_ptr<Pool> pool,
                     const ExpertSource* owner, const TransformerOptions& options)
    : spec_(std::move(spec)), state_(std::make_unique<Transformer::State>()) {
  Transformer::State& s = *state_;
  s.spec = spec_;
  s.options = options;
  s.options.experts = nullptr;
  s.prepare(std::move(pool));
  loader_ = std::make_unique<TransformerLoader>(TransformerLoader{checkpoint, s, nullptr, {}, {}});
  loader_->find_modules(owner);
  s.embedding = loader_->matrix(loader_->rooted(s.spec.embedding), s.spec.vocab, s.spec.hidden);
  loader_->buffers();
}

LayerWalk::~LayerWalk() = default;

void LayerWalk::embed(std::span<const int32_t> tokens, float* x) const {
  for (size_t t = 0; t < tokens.size(); ++t) {
    if (tokens[t] < 0 || tokens[t] >= spec_.vocab)
      fail("token {}: the vocabulary has {}", tokens[t], spec_.vocab);
    state_->embedding->values(tokens[t], 1, x + t * static_cast<size_t>(spec_.hidden));
  }
}

std::vector<AttentionStage> LayerWalk::stages(int layer) const {
  LayerWeights none;
  if (spec_.layers.at(static_cast<size_t>(layer)).mla) {
    none.mla.emplace();
  } else {
    none.gqa.emplace();
  }
  std::vector<AttentionStage> out;
  for (const AttentionLinear& of : loader_->attention_linears(layer, none)) {
    if (out.empty() || out.back().input != of.input) out.push_back({of.input, of.k, {}, {}});
    out.back().modules.push_back(of.module);
    out.back().n.push_back(of.n);
  }
  return out;
}

std::optional<DenseModules> LayerWalk::dense(int layer) const {
  std::optional<DenseMlp> of = loader_->dense_mlp(layer, spec_.layers.at(static_cast<size_t>(layer)));
  if (!of) return std::nullopt;
  return DenseModules{{of->gate, of->up, of->down}, of->inter, of->activation};
}

std::unique_ptr<StoredMatrix> LayerWalk::stored(const std::string& module) const {
  return open_linear(loader_->checkpoint, loader_->modules.at(module));
}

void LayerWalk::open(int layer, MatrixRounding rounding) {
  Transformer::State& s = *state_;
  const LayerSpec& of = spec_.layers.at(static_cast<size_t>(layer));
  s.layers.clear();
  s.spec.layers = {of};
  s.options.linear_rounding = std::move(rounding);
  s.layers.push_back(loader_->layer(layer, of));
  layer_ = layer;
}

void LayerWalk::reload(AttentionInput stage) {
  LayerWeights& w = state_->layers.at(0);
  for (const AttentionLinear& of : loader_->attention_linears(layer_, w))
    if (of.input == stage) loader_->load(of, w);
}

void LayerWalk::reload_dense() {
  LayerWeights& w = state_->layers.at(0);
  const std::optional<DenseMlp> of = loader_->dense_mlp(layer_, state_->spec.layers.at(0));
  w.dense.reset();
  if (of) w.dense.emplace(loader_->mlp(*of));
}

// From rows.x to what the layer's attention gives.
void LayerWalk::run_attention(const Rows& rows) {
  Transformer::State& s = *state_;
  KT_CHECK(layer_ >= 0, "no layer is open");
  int tokens = 0, pages = 0;
  std::vector<AttentionSequence> sequences;
  for (const int count : rows.lengths) {
    if (count > spec_.context) fail("{} tokens: the model's context is {}", count, spec_.context);
    sequences.push_back({.first = tokens, .count = count, .position = 0});
    for (int t = 0; t < count; ++t) s.positions.at(static_cast<size_t>(tokens + t)) = t;
    tokens += count;
    pages += (count + kPageTokens - 1) / kPageTokens;
  }
  KT_CHECK(tokens <= s.options.max_tokens, "{} tokens, at most {} fit", tokens, s.options.max_tokens);
  std::vector<int32_t> numbers(static_cast<size_t>(pages));
  for (int i = 0; i < pages; ++i) numbers[static_cast<size_t>(i)] = i;
  if (!cache_ || cache_->pages() < pages) {
    cache_.reset();
    cache_ = std::make_unique<KvCache>(s.kv_shape(), pages);
  }
  int next = 0;
  for (AttentionSequence& sequence : sequences) {
    sequence.pages = numbers.data() + next;
    next += (sequence.count + kPageTokens - 1) / kPageTokens;
  }
  std::copy_n(rows.x, static_cast<int64_t>(tokens) * spec_.hidden, s.x.data());
  const LayerWeights& w = s.layers.front();
  s.norm(w.input_norm, tokens);
  if (w.mla) {
    s.attend_mla(0, *cache_, sequences, tokens);
  } else {
    s.attend_gqa(0, *cache_, sequences, tokens);
  }
}

void LayerWalk::visit(const Rows& rows, AttentionInput stage,
                      const std::function<void(const float* rows, int64_t stride)>& see) {
  state_->watch = [&](AttentionInput input, const float* x, int64_t stride) {
    if (input == stage) see(x, stride);
    return input == stage;
  };
  try {
    const Pool::Burst burst(*state_->pool);
    run_attention(rows);
  } catch (...) {
    state_->watch = {};
    throw;
  }
  state_->watch = {};
}

void LayerWalk::attend(const Rows& rows) {
  Transformer::State& s = *state_;
  const Pool::Burst burst(*s.pool);
  run_attention(rows);
  const LayerWeights& w = s.layers.front();
  const int tokens = std::accumulate(rows.lengths.begin(), rows.lengths.end(), 0);
  const auto values = static_cast<int64_t>(tokens) * spec_.hidden;
  s.add_and_norm(w.post_norm, tokens);
  std::copy_n(s.x.data(), values, rows.x);
  std::copy_n(s.normed.data(), values, rows.normed);
  if (w.router.empty()) return;
  s.route(w, tokens);
  const auto slots = static_cast<int64_t>(tokens) * spec_.moe.top_k;
  std::copy_n(s.ids.data(), slots, rows.ids);
  std::copy_n(s.weights.data(), slots, rows.weights);
}

void LayerWalk::add_dense(int tokens, const float* normed, float* x) {
  Transformer::State& s = *state_;
  if (!s.layers.front().dense) return;
  const auto values = static_cast<int64_t>(tokens) * spec_.hidden;
  std::copy_n(normed, values, s.normed.data());
  std::copy_n(x, values, s.x.data());
  s.dense_feed_forward(s.layers.front(), tokens);
  std::copy_n(s.x.data(), values, x);
}

void LayerWalk::dense_scale(int tokens, const float* normed, float* factors) {
  Transformer::State& s = *state_;
  std::copy_n(normed, static_cast<int64_t>(tokens) * spec_.hidden, s.normed.data());
  std::copy_n(s.dense_scale(s.layers.front(), tokens), tokens, factors);
}

}  // namespace kt
