#include "models/feed_forward.h"

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

FeedForward::FeedForward(const FeedForwardSpec& spec, const LayerPlace& place) : place_(place) {
  if (const auto* dense = std::get_if<DenseSpec>(&spec)) {
    mlp_modules_ = modules_of(*dense, place);
    return;
  }
  moe_ = std::get<MoeSpec>(spec);
  if (moe_->shared_inter > 0) {
    mlp_modules_ = shared_modules(*moe_, place);
    shared_out_ = place.ops().rows("shared", place.hidden());
  }
  scores_ = place.ops().rows("scores", moe_->experts);
  ids_ = place.ops().rows("ids", moe_->top_k);
  weights_ = place.ops().rows("weights", moe_->top_k);
  if (moe_->weighs_inputs) each_ = place.ops().rows("each", int64_t{moe_->top_k} * place.hidden());
  if (moe_->shared_inter > 0 && moe_->shared_gate) factors_ = place.ops().rows("gate", 1);
}

void FeedForward::load(const ExpertSource* experts) {
  WeightLoader& loader = place_.loader;
  if (moe_) {
    const MoeSpec::Names& names = moe_->names;
    const int hidden = place_.hidden();
    router_ = loader.exact_linear(place_.named(names.router), moe_->experts, hidden, moe_->router.bias);
    if (moe_->router.correction_bias)
      correction_ = loader.vector(place_.named(names.correction_bias), moe_->experts);
    if (const auto& routing = loader.options().routing)
      forced_ = place_.ops().make_vector(forced_ids(*routing, place_.layer, moe_->experts, moe_->top_k));
    if (experts) routed_ = loader.experts(*experts, place_.layer, *moe_);
    if (factors_.id >= 0) shared_gate_ = loader.exact_linear(place_.named(names.shared_gate), 1, hidden);
  }
  load_mlp();
}

void FeedForward::load_mlp() {
  mlp_.reset();
  if (mlp_modules_) mlp_ = place_.loader.mlp(*mlp_modules_);
}

void FeedForward::for_each(FunctionRef<void(const PlacedWeights&, Kind)> use) const {
  if (routed_) use(*routed_, Kind::kRouted);
  for (const PlacedWeights* weights : std::initializer_list<const PlacedWeights*>{
           router_.get(), shared_gate_.get(), correction_.get(), forced_.get(), mlp_.get()})
    if (weights) use(*weights, Kind::kDense);
}

void FeedForward::begin(Ops& ops) const {
  if (moe_ && moe_->routes_first) choose(ops, place_.x);
}

void FeedForward::route(Ops& ops) const {
  if (!moe_->routes_first) choose(ops, place_.normed);
}

void FeedForward::choose(Ops& ops, Rows x) const {
  ops.route({.spec = &moe_->router,
             .router = router_.get(),
             .correction = correction_.get(),
             .top_k = moe_->top_k,
             .x = x,
             .scores = scores_,
             .ids = ids_,
             .weights = weights_,
             .forced = forced_.get()});
}

void FeedForward::run(Ops& ops, ExpertCounts* counts, size_t routed_layer) const {
  if (!routed_) return run_mlp(ops);
  const RunExperts routed{.experts = routed_.get(),
                          .top_k = moe_->top_k,
                          .x = moe_->weighs_inputs ? each_ : place_.normed,
                          .ids = ids_,
                          .weights = weights_,
                          .out = place_.out,
                          .input_each = moe_->weighs_inputs,
                          .watch = counts,
                          .watched = routed_layer};
  route(ops);
  if (moe_->weighs_inputs)
    ops.weigh_inputs({.top_k = moe_->top_k, .x = place_.normed, .weights = weights_, .each = each_});
  ops.send_experts(routed);
  if (mlp_) multiply_mlp(ops, shared_out_);  // beside the experts, where they run elsewhere
  ops.experts(routed);
  ops.add(place_.x, place_.out);
  if (mlp_) ops.add(place_.x, shared_out_);
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

void FeedForward::run_mlp(Ops& ops) const {
  if (!mlp_) return;
  multiply_mlp(ops, place_.out);
  ops.add(place_.x, place_.out);
}

}  // namespace kt::inline models
