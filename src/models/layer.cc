#include "models/layer.h"

#include "base/error.h"

namespace kt::inline models {

Layer::Layer(const LayerSpec& spec, const LayerPlace& place)
    : place_(place),
      input_norm_name_(place.named(spec.input_norm)),
      post_norm_name_(place.named(spec.post_norm)),
      residual_(spec.residual),
      mixer_(make_mixer(spec.mixer, place)),
      feed_forward_(spec.feed_forward, place) {}

void Layer::load(const ExpertSource* experts) {
  input_norm_ = place_.loader.norm(input_norm_name_, place_.hidden());
  post_norm_ = place_.loader.norm(post_norm_name_, place_.hidden());
  mixer_->load_vectors();
  for (size_t stage = 0; stage < mixer_->stages().size(); ++stage) mixer_->load_stage(stage);
  feed_forward_.load(experts);
}

void Layer::for_each(FunctionRef<void(const PlacedWeights&, FeedForward::Kind)> use) const {
  for (const PlacedVector* norm : {input_norm_.get(), post_norm_.get()})
    if (norm) use(*norm, FeedForward::Kind::kDense);
  mixer_->for_each([&](const PlacedWeights& weights) { use(weights, FeedForward::Kind::kDense); });
  feed_forward_.for_each(use);
}

void Layer::mix(Ops& ops, const MixerStep& step) const {
  KT_CHECK(residual_ == Residual::kPreNorm, "layer {}: a residual of another kind", place_.layer);
  feed_forward_.begin(ops);
  ops.norm(place_.x, *input_norm_, place_.loader.spec().norm_eps, place_.normed);
  mixer_->run(ops, step);
}

void Layer::after_mixer(Ops& ops) const {
  ops.add_norm(place_.x, place_.out, *post_norm_, place_.loader.spec().norm_eps, place_.normed);
}

void Layer::run(Ops& ops, const MixerStep& step, ExpertCounts* counts, size_t routed_layer) const {
  mix(ops, step);
  after_mixer(ops);
  feed_forward_.run(ops, counts, routed_layer);
}

}  // namespace kt::inline models
