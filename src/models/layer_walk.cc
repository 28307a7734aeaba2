#include "models/layer_walk.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace kt::inline models {

LayerWalk::LayerWalk(const Checkpoint& checkpoint, ModelSpec spec, std::shared_ptr<Ops> ops,
                     const ExpertSource* owner, const WeightOptions& options)
    : spec_(std::move(spec)),
      ops_(std::move(ops)),
      loader_(checkpoint, spec_, *ops_, options, owner),
      x_(ops_->rows("x", spec_.hidden)),
      normed_(ops_->rows("normed", spec_.hidden)),
      out_(ops_->rows("out", spec_.hidden)),
      embedding_(loader_.matrix(loader_.rooted(spec_.embedding), spec_.vocab, spec_.hidden)) {
  for (int i = 0; i < static_cast<int>(spec_.layers.size()); ++i) layers_.push_back(make(i));
  ops_->allocate(options.max_tokens);
}

LayerWalk::~LayerWalk() = default;

std::unique_ptr<Layer> LayerWalk::make(int layer) {
  return std::make_unique<Layer>(spec_.layers[static_cast<size_t>(layer)],
                                 LayerPlace{loader_, layer, x_, normed_, out_});
}

Layer& LayerWalk::open_layer() {
  KT_CHECK(open_ >= 0, "no layer is open");
  return *layers_[static_cast<size_t>(open_)];
}

uint64_t LayerWalk::weights(int layer) const {
  int64_t sum = 0;
  for (const Stage& stage : stages(layer))
    for (const Stage::Matrix& matrix : stage.matrices) sum += matrix.n * stage.k;
  if (const auto& of = mlp(layer)) sum += 3 * int64_t{of->inter} * spec_.hidden;
  if (const MoeSpec* moe = at(layer).feed_forward().moe()) sum += int64_t{moe->experts} * spec_.hidden;
  return static_cast<uint64_t>(sum);
}

void LayerWalk::embed(std::span<const int32_t> tokens, float* x) const {
  for (size_t t = 0; t < tokens.size(); ++t) {
    if (tokens[t] < 0 || tokens[t] >= spec_.vocab)
      fail("token {}: the vocabulary has {}", tokens[t], spec_.vocab);
    loader_.embed(*embedding_, tokens[t], x + t * static_cast<size_t>(spec_.hidden));
  }
}

void LayerWalk::open(int layer, MatrixRounding rounding) {
  if (open_ >= 0) layers_[static_cast<size_t>(open_)] = make(open_);
  open_ = -1;
  loader_.set_rounding(std::move(rounding));
  layers_.at(static_cast<size_t>(layer))->load(nullptr);
  open_ = layer;
}

void LayerWalk::reload(size_t stage) { open_layer().mixer().load_stage(stage); }
void LayerWalk::reload_mlp() { open_layer().feed_forward().load_mlp(); }

void LayerWalk::step(const SequenceRows& rows, const std::function<void(int tokens)>& run) {
  int tokens = 0, pages = 0;
  std::vector<AttentionSequence> sequences;
  for (const int count : rows.lengths) {
    if (count > spec_.context) fail("{} tokens: the model's context is {}", count, spec_.context);
    KT_CHECK(count <= spec_.context_of_single_layers(),
             "{} tokens for layers that share a choice of keys, at most {} can be", count,
             spec_.context_of_single_layers());
    sequences.push_back({.first = tokens, .count = count, .position = 0});
    tokens += count;
    pages += (count + kPageTokens - 1) / kPageTokens;
  }
  KT_CHECK(tokens <= loader_.options().max_tokens, "{} tokens, at most {} fit", tokens,
           loader_.options().max_tokens);
  const SequenceShape shape = keeps(open_);
  const int slots = shape.states.empty() ? 0 : static_cast<int>(sequences.size());
  if (!cache_ || cache_->pages() < pages || cache_->slots() < slots || !(cache_->shape() == shape)) {
    cache_.reset();
    cache_ = std::make_unique<KvCache>(shape, pages, slots);
  }
  std::vector<int32_t> numbers(static_cast<size_t>(pages));
  std::iota(numbers.begin(), numbers.end(), 0);
  int next = 0, slot = 0;
  for (AttentionSequence& sequence : sequences) {
    sequence.pages = numbers.data() + next;
    next += (sequence.count + kPageTokens - 1) / kPageTokens;
    if (slots == 0) continue;
    cache_->clear_slot(slot);
    sequence.slot = slot++;
  }
  const StepScope scope(*ops_, {.sequences = sequences, .tokens = tokens, .cache = cache_.get()});
  ops_->write({rows.x, static_cast<size_t>(tokens) * static_cast<size_t>(spec_.hidden)}, x_);
  run(tokens);
}

void LayerWalk::visit(const SequenceRows& rows, size_t stage,
                      const std::function<void(const float* rows, int64_t stride)>& see) {
  const Layer& layer = open_layer();
  step(rows, [&](int tokens) {
    const auto watch = [&](size_t at) {
      if (at != stage) return false;
      const Rows input = stages(open_).at(stage).input;
      std::vector<float> values(static_cast<size_t>(tokens) * static_cast<size_t>(input.width));
      ops_->read(input, values);
      see(values.data(), input.width);
      return true;
    };
    FunctionRef<bool(size_t)> watching(watch);
    layer.mix(*ops_, {.watch = &watching});
  });
}

void LayerWalk::mix(const SequenceRows& rows) {
  const Layer& layer = open_layer();
  step(rows, [&](int tokens) {
    layer.mix(*ops_, {});
    layer.after_mixer(*ops_);
    const auto values = static_cast<size_t>(tokens) * static_cast<size_t>(spec_.hidden);
    ops_->read(x_, {rows.x, values});
    ops_->read(normed_, {rows.normed, values});
    if (!layer.feed_forward().moe()) return;
    const FeedForward& part = layer.feed_forward();
    const auto slots = static_cast<size_t>(tokens) * static_cast<size_t>(part.route_ids().width);
    part.route(*ops_);
    if (rows.routed) ops_->read(part.routed_input(), {rows.routed, values});
    ops_->read_ids(part.route_ids(), {rows.ids, slots});
    ops_->read(part.route_weights(), {rows.weights, slots});
  });
}

void LayerWalk::step(int tokens, const float* normed, const std::function<void()>& run) {
  const StepScope scope(*ops_, {.sequences = {}, .tokens = tokens});
  ops_->write({normed, static_cast<size_t>(tokens) * static_cast<size_t>(spec_.hidden)}, normed_);
  run();
}

void LayerWalk::finish(int tokens, const float* normed, const float* routed, float* x) {
  const Layer& layer = open_layer();
  const size_t count = static_cast<size_t>(tokens) * static_cast<size_t>(spec_.hidden);
  step(tokens, normed, [&] {
    ops_->write({x, count}, x_);
    if (routed) ops_->write({routed, count}, out_);
    layer.finish(*ops_, routed != nullptr);
    ops_->read(x_, {x, count});
  });
}

void LayerWalk::mlp_factors(int tokens, const float* normed, float* factors) {
  step(tokens, normed, [&] {
    const Rows rows = open_layer().feed_forward().mlp_factors(*ops_);
    if (rows.id < 0)
      std::fill_n(factors, tokens, 1.0f);
    else
      ops_->read(rows, {factors, static_cast<size_t>(tokens)});
  });
}

}  // namespace kt::inline models
