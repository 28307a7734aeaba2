// The indexer of a layer: which matrices it has and which rows they multiply, the plane of its keys, and how it
// chooses the keys that attention sees. A part of a mixer.
#pragma once
#include <memory>
#include <vector>

#include "models/mixer.h"

namespace kt::inline models {

class Indexer {
 public:
  Indexer(const IndexerSpec& spec, const LayerPlace& place);

  // For the stages of place.normed, and of the rows that the queries are made of; not of a layer that shares a choice.
  Stage::Matrix key_matrix() const;
  Stage::Matrix query_matrix() const;
  KvShape plane(KvType type) const;
  void load();
  void for_each(FunctionRef<void(const PlacedWeights&)> use) const;

  // The key's matrix, and the weights of heads: what multiplies place.normed.
  void add_key(const PlacedLinear* key, std::vector<LinearUse>& uses) const;
  Rows q() const { return q_; }
  // After q() and what add_key() asked for. `plane` is that of its keys.
  void choose(Ops& ops, int plane) const;
  Rows seen() const { return seen_; }  // by all layers until the next one chooses

 private:
  Rows rows(const char* name, int64_t width) const { return place_.ops().rows(name, width); }

  const IndexerSpec spec_;
  const LayerPlace place_;
  const Rows seen_;
  Rows q_, k_, weights_;
  int rotation_ = 0;
  std::unique_ptr<PlacedVector> k_norm_, k_bias_;
  std::unique_ptr<PlacedLinear> weights_proj_;
};

}  // namespace kt::inline models
