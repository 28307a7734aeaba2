#include "models/feed_forward.h"

#include <cmath>

namespace kt::inline models {
namespace {

MlpModules modules_of(const DenseSpec& spec, const LayerPlace& place) {
  return {.modules = {place.named(spec.names.gate), place.named(spec.names.up), place.named(spec.names.down)},
          .inter = spec.inter,
          .activation = spec.activation,
          .bias = spec.bias};
}

MlpModules shared_modules(const MoeSpec& spec, const LayerPlace& place) {
  const std::string shared = place.named(spec.names.shared);
  return {.modules = {shared + ".gate_proj", shared + ".up_proj", shared + ".down_proj"},
          .inter = spec.shared_inter,
          .activation = spec.activation};
}

}  // namespace

FeedForward::FeedForward(const LayerSpec& layer, const LayerPlace& place)
    : place_(place),
      out_norm_name_(layer.residual == Residual::kBothNorms ? place.named(layer.fed_norm) : "") {
  const FeedForwardSpec& spec = layer.feed_forward;
  if (const auto* dense = std::get_if<DenseSpec>(&spec)) {
    mlp_modules_ = modules_of(*dense, place);
    return;
  }
  moe_ = std::get<MoeSpec>(spec);
  if (moe_->shared_inter > 0) {
    mlp_modules_ = shared_modules(*moe_, place);
    shared_out_ = place.ops().rows("shared", place.hidden());
  }
  routed_in_ = router_in_ = place.normed;
  if (moe_->apart) {
    routed_in_ = place.ops().rows("routed", place.hidden());
    router_in_ = place.ops().rows("router", place.hidden());
  }
  scores_ = place.ops().rows("scores", moe_->experts);
  ids_ = place.ops().rows("ids", moe_->top_k);
  weights_ = place.ops().rows("weights", moe_->top_k);
  if (moe_->weighs_inputs) each_ = place.ops().rows("each", int64_t{moe_->top_k} * place.hidden());
  if (moe_->shared_inter > 0 && moe_->shared_gate) factors_ = place.ops().rows("gate", 1);
}

void FeedForward::load(const ExpertSource* experts) {
  WeightLoader& loader = place_.loader;
  if (!out_norm_name_.empty()) out_norm_ = loader.norm(out_norm_name_, place_.hidden());
  if (moe_) {
    const MoeSpec::Names& names = moe_->names;
    const int hidden = place_.hidden();
    router_ = loader.exact_linear(place_.named(names.router), moe_->experts, hidden, moe_->router.bias);
    if (moe_->router.correction_bias)
      correction_ = loader.vector(place_.named(names.correction_bias), moe_->experts);
    if (const auto& routing = loader.options().routing)
      forced_ = place_.ops().make_vector(forced_ids(*routing, place_.layer, moe_->experts, moe_->top_k));
    if (moe_->apart) load_apart(*moe_->apart);
    if (experts) routed_ = loader.experts(*experts, place_.layer, *moe_);
    if (factors_.id >= 0) shared_gate_ = loader.exact_linear(place_.named(names.shared_gate), 1, hidden);
  }
  load_mlp();
}

void FeedForward::load_apart(const MoeSpec::Apart& names) {
  const WeightLoader& loader = place_.loader;
  const int hidden = place_.hidden();
  router_scale_ =
      loader.vector(place_.named(names.router_scale), hidden, 1 / std::sqrt(static_cast<double>(hidden)));
  expert_scales_ = loader.vector(place_.named(names.expert_scales), moe_->experts);
  routed_norm_ = loader.norm(place_.named(names.routed_norm), hidden);
  routed_out_norm_ = loader.norm(place_.named(names.routed_out_norm), hidden);
  if (moe_->shared_inter > 0) shared_out_norm_ = loader.norm(place_.named(names.shared_out_norm), hidden);
}

void FeedForward::load_mlp() {
  mlp_.reset();
  if (mlp_modules_) mlp_ = place_.loader.mlp(*mlp_modules_);
}

void FeedForward::for_each(FunctionRef<void(const PlacedWeights&, Kind)> use) const {
  if (routed_) use(*routed_, Kind::kRouted);
  for (const PlacedWeights* weights : std::initializer_list<const PlacedWeights*>{
           router_.get(), shared_gate_.get(), correction_.get(), forced_.get(), mlp_.get(), out_norm_.get(),
           router_scale_.get(), expert_scales_.get(), routed_norm_.get(), routed_out_norm_.get(),
           shared_out_norm_.get()})
    if (weights) use(*weights, Kind::kDense);
}

void FeedForward::begin(Ops& ops) const {
  if (moe_ && moe_->routes_first) choose(ops, place_.x);
}

void FeedForward::route(Ops& ops) const {
  if (moe_->routes_first) return;
  if (router_scale_) ops.norm(place_.x, *router_scale_, eps(), router_in_);
  if (routed_norm_) ops.norm(place_.x, *routed_norm_, eps(), routed_in_);
  choose(ops, router_in_);
}

void FeedForward::choose(Ops& ops, Rows x) const {
  ops.route({.spec = &moe_->router,
             .router = router_.get(),
             .correction = correction_.get(),
             .scales = expert_scales_.get(),
             .top_k = moe_->top_k,
             .x = x,
             .scores = scores_,
             .ids = ids_,
             .weights = weights_,
             .forced = forced_.get()});
}

void FeedForward::run(Ops& ops, ExpertCounts* counts, size_t routed_layer) const {
  if (!routed_) return finish(ops, false);
  const RunExperts routed{.experts = routed_.get(),
                          .top_k = moe_->top_k,
                          .x = moe_->weighs_inputs ? each_ : routed_in_,
                          .ids = ids_,
                          .weights = weights_,
                          .out = place_.out,
                          .input_each = moe_->weighs_inputs,
                          .watch = counts,
                          .watched = routed_layer};
  route(ops);
  if (moe_->weighs_inputs)
    ops.weigh_inputs({.top_k = moe_->top_k, .x = routed_in_, .weights = weights_, .each = each_});
  ops.send_experts(routed);
  if (mlp_) multiply_mlp(ops, shared_out_);  // beside the experts, where they run elsewhere
  ops.experts(routed);
  add_all(ops, true);
}

// What routed experts gave, where there are any, and the MLP.
void FeedForward::add_all(Ops& ops, bool routed) const {
  const Rows out = place_.out, mlp = routed ? shared_out_ : out;
  if (routed && routed_out_norm_) ops.norm(out, *routed_out_norm_, eps(), out);
  if (mlp_ && shared_out_norm_) ops.norm(mlp, *shared_out_norm_, eps(), mlp);
  if (out_norm_) {  // of the sum
    if (routed && mlp_) ops.add(out, mlp);
    if (routed || mlp_) ops.norm(out, *out_norm_, eps(), out);
  }
  if (routed || (mlp_ && out_norm_)) ops.add(place_.x, out);
  if (mlp_ && !out_norm_) ops.add(place_.x, mlp);
}

Rows FeedForward::mlp_factors(Ops& ops) const {
  if (!shared_gate_) return {};
  const LinearUse gate{.weights = shared_gate_.get(), .x = place_.normed, .y = factors_};
  ops.linear({&gate, 1});
  ops.sigmoid(factors_);
  return factors_;
}

void FeedForward::multiply_mlp(Ops& ops, Rows out) const {
  ops.mlp({.mlp = mlp_.get(), .x = place_.normed, .factors = mlp_factors(ops), .out = out});
}

void FeedForward::finish(Ops& ops, bool routed) const {
  if (mlp_) multiply_mlp(ops, routed ? shared_out_ : place_.out);
  add_all(ops, routed);
}

}  // namespace kt::inline models
