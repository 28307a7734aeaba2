#include "models/layer.h"

namespace kt::inline models {

Layer::Layer(const LayerSpec& spec, const LayerPlace& place)
    : place_(place), spec_(spec), mixer_(make_mixer(spec.mixer, place)), feed_forward_(spec, place) {}

void Layer::load(const ExpertSource* experts) {
  const auto norm = [&](const std::string& name) {
    return place_.loader.norm(place_.named(name), place_.hidden());
  };
  input_norm_ = norm(spec_.input_norm);
  post_norm_ = norm(spec_.post_norm);
  if (spec_.residual == Residual::kBothNorms) {
    mixed_norm_ = norm(spec_.mixed_norm);
    scalar_ = place_.loader.number(place_.named(spec_.scalar));
  }
  mixer_->load_vectors();
  for (size_t stage = 0; stage < mixer_->stages().size(); ++stage) mixer_->load_stage(stage);
  feed_forward_.load(experts);
}

void Layer::for_each(FunctionRef<void(const PlacedWeights&, FeedForward::Kind)> use) const {
  for (const PlacedVector* norm : {input_norm_.get(), post_norm_.get(), mixed_norm_.get()})
    if (norm) use(*norm, FeedForward::Kind::kDense);
  mixer_->for_each([&](const PlacedWeights& weights) { use(weights, FeedForward::Kind::kDense); });
  feed_forward_.for_each(use);
}

void Layer::mix(Ops& ops, const MixerStep& step) const {
  feed_forward_.begin(ops);
  ops.norm(place_.x, *input_norm_, place_.loader.spec().norm_eps, place_.normed);
  mixer_->run(ops, step);
}

void Layer::after_mixer(Ops& ops) const {
  const double eps = place_.loader.spec().norm_eps;
  if (mixed_norm_) ops.norm(place_.out, *mixed_norm_, eps, place_.out);
  ops.add_norm(place_.x, place_.out, *post_norm_, eps, place_.normed);
}

void Layer::run(Ops& ops, const MixerStep& step, ExpertCounts* counts, size_t routed_layer) const {
  mix(ops, step);
  after_mixer(ops);
  feed_forward_.run(ops, counts, routed_layer);
  if (scalar_ != 1) ops.scale(place_.x, scalar_);
}

void Layer::finish(Ops& ops, bool routed) const {
  feed_forward_.finish(ops, routed);
  if (scalar_ != 1) ops.scale(place_.x, scalar_);
}

}  // namespace kt::inline models
