// The part of a layer after the mixer: a gated MLP for every token, or routed experts with a shared one beside
// them. Adds what it gives to the stream of activations.
#pragma once
#include <memory>
#include <optional>

#include "models/expert_counts.h"
#include "models/mixer.h"

namespace kt::inline models {

class FeedForward {
 public:
  // Nothing is read yet.
  FeedForward(const LayerSpec& spec, const LayerPlace& place);

  const MoeSpec* moe() const { return moe_ ? &*moe_ : nullptr; }  // null: a dense layer
  // Modules of the MLP that every token visits, if there is one.
  const std::optional<MlpModules>& mlp_modules() const { return mlp_modules_; }
  // Routed experts only where `experts` is not null.
  void load(const ExpertSource* experts);
  void load_mlp();  // the MLP alone; again, where its matrices changed
  // Every weight it holds; which of them are routed experts.
  enum class Kind { kRouted, kDense };
  void for_each(FunctionRef<void(const PlacedWeights&, Kind)> use) const;

  // Before the mixer: routers that read what the layer gets.
  void begin(Ops& ops) const;
  // place.normed through all of it; x += what comes out. `counts` of this model and which of its layers this is.
  void run(Ops& ops, ExpertCounts* counts, size_t routed_layer) const;
  // Where the layer routes: experts and weights of place.normed, where begin() did not choose them.
  void route(Ops& ops) const;
  Rows route_ids() const { return ids_; }
  Rows route_weights() const { return weights_; }
  // x += what the MLP gives, where there is one, and `routed`: what routed experts gave, which place.out has.
  void finish(Ops& ops, bool routed) const;
  // What routed experts read, behind route().
  Rows routed_input() const { return routed_in_; }
  // Factors [tokens, 1] of what the MLP gives; no name: all are 1.
  Rows mlp_factors(Ops& ops) const;

 private:
  void load_apart(const MoeSpec::Apart& names);
  void multiply_mlp(Ops& ops, Rows out) const;
  void choose(Ops& ops, Rows x) const;
  void add_all(Ops& ops, bool routed) const;
  double eps() const { return place_.loader.spec().norm_eps; }

  const LayerPlace place_;
  const std::string out_norm_name_;  // empty: none
  std::optional<MoeSpec> moe_;
  std::optional<MlpModules> mlp_modules_;
  std::unique_ptr<PlacedLinear> router_, shared_gate_;
  std::unique_ptr<PlacedVector> correction_, forced_;
  std::unique_ptr<PlacedVector> out_norm_;  // of all that it gives; null: none
  // Of MoeSpec::Apart, in its order; null: none. The router's scale has its division.
  std::unique_ptr<PlacedVector> router_scale_, expert_scales_, routed_norm_, routed_out_norm_,
      shared_out_norm_;
  std::unique_ptr<PlacedExperts> routed_, mlp_;
  Rows scores_, ids_, weights_, factors_, shared_out_;
  Rows routed_in_, router_in_;  // [tokens, hidden]; place.normed, but where MoeSpec::Apart has norms for them
  Rows each_;  // [tokens, top_k * hidden] what each expert of a token reads, where weights are of that
};

}  // namespace kt::inline models
