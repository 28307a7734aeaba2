#include "models/indexer.h"

namespace kt::inline models {

Indexer::Indexer(const IndexerSpec& spec, const LayerPlace& place)
    : spec_(spec), place_(place), seen_(rows("seen keys", seen_columns(place.loader.spec().context))) {
  if (spec.shared) return;
  q_ = rows("indexer's q", int64_t{spec.heads} * spec.dim);
  k_ = rows("indexer's k", spec.dim);
  weights_ = rows("indexer's weights", spec.heads);
  rotation_ = place.ops().make_rotation(spec.rope);
}

Stage::Matrix Indexer::key_matrix() const { return {place_.named(spec_.names.k), k_.width}; }
Stage::Matrix Indexer::query_matrix() const { return {place_.named(spec_.names.q), q_.width}; }
KvShape Indexer::plane(KvType type) const { return {.d = spec_.dim, .type = type}; }

void Indexer::load() {
  WeightLoader& loader = place_.loader;
  k_norm_ = loader.vector(place_.named(spec_.names.k_norm) + ".weight", spec_.dim);
  k_bias_ = loader.vector(place_.named(spec_.names.k_norm) + ".bias", spec_.dim);
  // Scores of many keys are close: these are read as routers are. The formula divides by roots of sizes too, which
  // changes no choice.
  weights_proj_ = loader.exact_linear(place_.named(spec_.names.weights), spec_.heads, place_.hidden());
}

void Indexer::for_each(FunctionRef<void(const PlacedWeights&)> use) const {
  for (const PlacedWeights* weights :
       std::initializer_list<const PlacedWeights*>{k_norm_.get(), k_bias_.get(), weights_proj_.get()})
    if (weights) use(*weights);
}

void Indexer::add_key(const PlacedLinear* key, std::vector<LinearUse>& uses) const {
  uses.push_back({.weights = key, .x = place_.normed, .y = k_});
  uses.push_back({.weights = weights_proj_.get(), .x = place_.normed, .y = weights_});
}

void Indexer::choose(Ops& ops, int plane) const {
  ops.rotate_write({.plane = plane,
                    .rotation = rotation_,
                    .norm_eps = spec_.norm_eps,
                    .q = {.rows = q_, .heads = spec_.heads, .stride = spec_.dim},
                    .k = {.rows = k_,
                          .heads = 1,
                          .stride = spec_.dim,
                          .norm = k_norm_.get(),
                          .norms = 1,
                          .norm_bias = k_bias_.get()}});
  ops.choose_keys({.plane = plane,
                   .q = q_,
                   .weights = weights_,
                   .heads = spec_.heads,
                   .budget = spec_.budget,
                   .seen = seen_});
}

}  // namespace kt::inline models
