// One layer of a model: norms, a mixer and a feed-forward part. What a Transformer runs and calibration walks
// through is this.
#pragma once
#include <memory>

#include "models/feed_forward.h"
#include "models/mixer.h"

namespace kt::inline models {

class Layer {
 public:
  // Layer number `place.layer` of the checkpoint, made as `spec` says. Nothing is read yet.
  Layer(const LayerSpec& spec, const LayerPlace& place);

  Mixer& mixer() { return *mixer_; }
  const Mixer& mixer() const { return *mixer_; }
  FeedForward& feed_forward() { return feed_forward_; }
  const FeedForward& feed_forward() const { return feed_forward_; }

  // All weights; routed experts only where there is a source of them.
  void load(const ExpertSource* experts);
  void for_each(FunctionRef<void(const PlacedWeights&, FeedForward::Kind)> use) const;

  // What the feed-forward part asks of x, and x through the mixer, to place.out.
  void mix(Ops& ops, const MixerStep& step) const;
  // x += what the mixer gave; place.normed for the feed-forward part.
  void after_mixer(Ops& ops) const;
  // What the feed-forward part gives besides is FeedForward::finish()'s.
  void finish(Ops& ops, bool routed) const;
  void run(Ops& ops, const MixerStep& step, ExpertCounts* counts, size_t routed_layer) const;

 private:
  const LayerPlace place_;
  const LayerSpec spec_;
  std::unique_ptr<PlacedVector> input_norm_, post_norm_;
  std::unique_ptr<PlacedVector> mixed_norm_;  // null: none
  float scalar_ = 1;
  std::unique_ptr<Mixer> mixer_;
  FeedForward feed_forward_;
};

}  // namespace kt::inline models
