#include "models/segment.h"

#include <algorithm>

namespace kt::inline models {
namespace {

void add_to(SequenceShape& all, const SequenceShape& more) {
  all.planes.insert(all.planes.end(), more.planes.begin(), more.planes.end());
  all.states.insert(all.states.end(), more.states.begin(), more.states.end());
}

// Of the MLP that every token visits: they stand beside what is packed of it.
size_t mlp_bias_bytes(const FeedForward& part, int hidden) {
  const auto& mlp = part.mlp_modules();
  return mlp && mlp->bias ? static_cast<size_t>(2 * mlp->inter + hidden) * sizeof(float) : 0;
}

}  // namespace

Segment::Segment(const Checkpoint& checkpoint, const ModelSpec& spec, std::shared_ptr<Ops> ops,
                 const WeightOptions& options, const ExpertSource* routed, KvType kv)
    : spec_(spec),
      kv_(kv),
      ops_(std::move(ops)),
      loader_(checkpoint, spec, *ops_, options, routed),
      x_(ops_->rows("x", spec.hidden)),
      normed_(ops_->rows("normed", spec.hidden)),
      out_(ops_->rows("out", spec.hidden)) {}

void Segment::place(int first, int count, std::vector<int>& routing) {
  layers_.reserve(static_cast<size_t>(count));
  for (int number = first; number < first + count; ++number) {
    const LayerSpec& layer = spec_.layers[static_cast<size_t>(number)];
    layers_.push_back({.layer = Layer(layer, {loader_, number, x_, normed_, out_}),
                       .plane = static_cast<int>(keeps_.planes.size()),
                       .state = static_cast<int>(keeps_.states.size()),
                       .routed = routing.size()});
    add_to(keeps_, layers_.back().layer.mixer().keeps(kv_));
    if (layer.moe()) routing.push_back(number);
  }
}

void Segment::run(ExpertCounts* counts) const {
  for (const Placed& at : layers_)
    at.layer.run(*ops_, {.plane = at.plane, .state = at.state}, counts, at.routed);
}

void Segment::load_head() {
  final_norm_ = loader_.norm(loader_.rooted(spec_.final_norm), spec_.hidden);
  head_ = loader_.linear(loader_.head(), spec_.vocab, spec_.hidden);
}

void Segment::run_head(std::span<const int> wanted) const {
  ops_->norm(x_, *final_norm_, spec_.norm_eps, normed_);
  ops_->pick(normed_, wanted);
  ops_->project(*head_, normed_, static_cast<int>(wanted.size()), static_cast<float>(spec_.logit_cap));
}

void Segment::for_each(FunctionRef<void(const PlacedWeights&, FeedForward::Kind)> use) const {
  if (head_) {
    use(*head_, FeedForward::Kind::kDense);
    use(*final_norm_, FeedForward::Kind::kDense);
  }
  for (const Placed& at : layers_) at.layer.for_each(use);
}

StepNeeds Segment::measure(std::span<const AttentionSequence> sequences, int tokens, int logit_rows) const {
  return ops_->measure({.sequences = sequences, .tokens = tokens}, keeps_, [&] {
    run(nullptr);
    if (head_) ops_->project(*head_, normed_, logit_rows, static_cast<float>(spec_.logit_cap));
  });
}

// The loader counts biases that stand beside packed experts for all layers together. Dense MLPs say how many are
// theirs; the others are those of routed experts, which are alike.
size_t Segment::biases_of_an_expert() const {
  size_t left = loader_.expert_bias_bytes(), routed = 0;
  for (const Placed& at : layers_) {
    const FeedForward& part = at.layer.feed_forward();
    left -= mlp_bias_bytes(part, spec_.hidden);
    if (part.moe()) routed += static_cast<size_t>(part.moe()->experts);
  }
  return routed == 0 ? 0 : left / routed;
}

void Segment::add_sizes(PlacementSizes& out) const {
  if (head_)
    for (const PlacedWeights* weights : {static_cast<const PlacedWeights*>(head_.get()),
                                         static_cast<const PlacedWeights*>(final_norm_.get())})
      out.head += weights->packed_bytes() + weights->plain_bytes();
  const size_t biases = biases_of_an_expert();
  for (const Placed& at : layers_) {
    const MoeSpec* const moe = at.layer.feed_forward().moe();
    PlacementSizes::Layer& sizes = out.layers.emplace_back();
    sizes.dense = mlp_bias_bytes(at.layer.feed_forward(), spec_.hidden);
    sizes.page = at.layer.mixer().keeps(kv_).page_bytes();
    sizes.page_int8 = std::min<uint64_t>(sizes.page, at.layer.mixer().keeps(KvType::kS8).page_bytes());
    sizes.state = at.layer.mixer().keeps(kv_).slot_bytes();
    at.layer.for_each([&](const PlacedWeights& weights, FeedForward::Kind kind) {
      if (kind == FeedForward::Kind::kDense) {
        sizes.dense += weights.packed_bytes() + weights.plain_bytes();
        return;
      }
      sizes.experts = moe->experts;
      for (int node = 0; node < ops_->nodes(); ++node)
        sizes.expert.push_back(weights.packed_bytes(node) / static_cast<size_t>(moe->experts));
      sizes.expert.front() += biases;
    });
  }
}

size_t SegmentCaches::bytes() const {
  size_t sum = 0;
  for (const auto& part : parts_) sum += part ? part->bytes() : 0;
  return sum;
}

void SegmentCaches::clear_slot(int slot) {
  for (const auto& part : parts_)
    if (part) part->clear_slot(slot);
}

void SegmentCaches::copy_slot(int from, int to) {
  for (const auto& part : parts_)
    if (part) part->copy_slot(from, to);
}

}  // namespace kt::inline models
