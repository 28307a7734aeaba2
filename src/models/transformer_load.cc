// A Transformer built from a checkpoint: memory and weights.
#include <algorithm>

#include "base/error.h"
#include "models/transformer_loader.h"

namespace kt {
std::vector<Transformer::State::FloatBuffer> Transformer::State::float_buffers() {
  const MlaSpec& mla = spec.mla;
  const GqaSpec& gqa = spec.gqa;
  const int64_t kv_width = int64_t{gqa.kv_heads} * gqa.head_dim, q_width = int64_t{gqa.heads} * gqa.head_dim;
  return {{&x, spec.hidden},
          {&normed, spec.hidden},
          {&out, spec.hidden},
          {&q, std::max({q_width, int64_t{mla.heads} * (mla.nope + mla.rope), int64_t{mla.heads} * mla.v})},
          {&k, std::max<int64_t>(kv_width, mla.kv_rank + mla.rope)},
          {&v, std::max<int64_t>(kv_width, mla.q_rank)},
          {&latent, int64_t{mla.heads} * (mla.kv_rank + mla.rope)},
          {&heads, std::max(q_width, int64_t{mla.heads} * mla.kv_rank)},
          {&router_logits, spec.moe.experts},
          {&weights, spec.moe.top_k},
          {&gate, 1},
          {&ones, 1}};
}

std::vector<Transformer::State::IdBuffer> Transformer::State::id_buffers() {
  return {{&ids, spec.moe.top_k}, {&zeros, 1}, {&positions, 1}};
}

uint64_t Transformer::State::embedding_bytes() const {
  const auto values = static_cast<double>(embedding->n) * static_cast<double>(embedding->k);
  return static_cast<uint64_t>(values / 8 * stored_bits(embedding->format, embedding->n, embedding->k));
}

void Transformer::State::prepare(std::shared_ptr<Pool> workers) {
  pool = std::move(workers);
  workspace = std::make_shared<Workspace>();
  kernels = &kt::kernels();
  rope = std::make_unique<Rope>(spec.rope);
  linears = std::make_unique<LinearWork>(pool);
  attention = std::make_unique<AttentionWork>(pool, *kernels);
}

Transformer::Transformer(const Checkpoint& checkpoint, ModelSpec spec, std::shared_ptr<Pool> pool,
                         TransformerOptions options)
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.spec = std::move(spec);
  s.options = options;
  s.prepare(std::move(pool));
  if (s.spec.layers.empty()) fail("{}: a model without layers", checkpoint.path());
  const bool moe =
      std::any_of(s.spec.layers.begin(), s.spec.layers.end(), [](const LayerSpec& l) { return l.moe; });
  std::unique_ptr<ExpertSource> own;
  if (moe && !options.experts) own = open_experts(checkpoint);
  const ExpertSource* experts = options.experts ? options.experts : own.get();
  s.options.experts = nullptr;  // read now, not kept
  TransformerLoader loader{checkpoint, s, experts, {}, {}};
  loader.find_modules(own.get());
  s.embedding = loader.matrix(loader.rooted(s.spec.embedding), s.spec.vocab, s.spec.hidden);
  s.final_norm = loader.vector(loader.rooted(s.spec.final_norm) + ".weight", s.spec.hidden);
  s.head = loader.linear(loader.head(), s.spec.vocab, s.spec.hidden);
  const int layers = static_cast<int>(s.spec.layers.size());
  for (int i = 0; i < layers; ++i) {
    s.layers.push_back(loader.layer(i, s.spec.layers[static_cast<size_t>(i)]));
    if (options.on_layer) options.on_layer(i + 1, layers);
  }
  s.start_counting();
  if (!s.options.sizes_only) loader.buffers();
}

size_t Transformer::packed_bytes() const {
  size_t bytes = state_->head.packed_bytes();
  for (const LayerWeights& w : state_->layers) {
    for_each_linear(w, [&](const Linear& linear) { bytes += linear.packed_bytes(); });
    if (w.routed) bytes += w.routed->packed_bytes();
    if (w.dense) bytes += w.dense->packed_bytes();
  }
  return bytes;
}

double Transformer::stored_bytes() const {
  double bytes = state_->dense_work.bytes + state_->head_work.bytes;
  for (const LayerWeights& w : state_->layers)
    if (w.routed) bytes += w.routed->stored_bytes_per_expert() * w.routed->shape().experts;
  return bytes;
}

}  // namespace kt
