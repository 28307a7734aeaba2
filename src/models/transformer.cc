#include "models/transformer.h"

#include <algorithm>

#include "base/checked.h"
#include "base/error.h"
#include "models/layer.h"
#include "models/placement.h"
#include "models/unread_tensors.h"
#include "models/weight_loader.h"

namespace kt::inline models {
namespace {

// The last so many new tokens of a sequence get logits.
int logit_tokens(const SequenceInput& input) {
  const int count = static_cast<int>(input.tokens.size());
  switch (input.logits) {
    case SequenceInput::Logits::kNone:
      return 0;
    case SequenceInput::Logits::kLast:
      return std::min(count, 1);
    case SequenceInput::Logits::kAll:
      return count;
  }
  return 0;
}

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

struct Transformer::State {
  // A layer, and where what it keeps begins.
  struct Placed {
    Layer layer;
    int plane = 0, state = 0;
    size_t routed = 0;  // which of those that route
  };

  const ModelSpec spec;
  const int max_tokens;
  const KvType kv_type;
  std::shared_ptr<Ops> ops;
  WeightLoader loader;
  IdleTensors idle;
  Rows x, normed, out;
  std::unique_ptr<StoredMatrix> embedding;  // rows are read as tokens need them
  std::unique_ptr<PlacedVector> final_norm;
  std::unique_ptr<PlacedLinear> head;
  std::vector<Placed> layers;
  SequenceShape keeps;
  std::unique_ptr<ExpertCounts> expert_counts;  // null: no layer routes

  State(const Checkpoint& checkpoint, ModelSpec of, std::shared_ptr<Ops> with, const WeightOptions& options,
        const ExpertSource* routed, KvType kv)
      : spec(std::move(of)),
        max_tokens(options.max_tokens),
        kv_type(kv),
        ops(std::move(with)),
        loader(checkpoint, spec, *ops, options, routed),
        x(ops->rows("x", spec.hidden)),
        normed(ops->rows("normed", spec.hidden)),
        out(ops->rows("out", spec.hidden)) {}

  void place_layers();
  uint64_t embedding_bytes() const;
  void run_layers(ExpertCounts* counts) const;  // x to x
  std::vector<AttentionSequence> take(std::span<const SequenceInput> inputs) const;
  void for_each(FunctionRef<void(const PlacedWeights&, FeedForward::Kind)> use) const;
  StepNeeds measure(std::span<const AttentionSequence> sequences, int tokens, int logit_rows) const;
  StepNeeds needs(const MemoryRequest& request) const;
  size_t logit_bytes(const MemoryRequest& request) const;
  size_t biases_of_an_expert() const;
  void add_sizes(const Placed& at, PlacementSizes& out) const;
};

void Transformer::State::place_layers() {
  std::vector<int> routing;
  layers.reserve(spec.layers.size());
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const int number = static_cast<int>(i);
    layers.push_back({.layer = Layer(spec.layers[i], {loader, number, x, normed, out}),
                      .plane = static_cast<int>(keeps.planes.size()),
                      .state = static_cast<int>(keeps.states.size()),
                      .routed = routing.size()});
    add_to(keeps, layers.back().layer.mixer().keeps(kv_type));
    if (spec.layers[i].moe()) routing.push_back(number);
  }
  if (const MoeSpec* moe = spec.moe())
    expert_counts = std::make_unique<ExpertCounts>(std::move(routing), moe->experts, moe->top_k);
}

uint64_t Transformer::State::embedding_bytes() const {
  const auto values = static_cast<double>(embedding->n) * static_cast<double>(embedding->k);
  return static_cast<uint64_t>(values / 8 * stored_bits(embedding->format, embedding->n, embedding->k));
}

void Transformer::State::run_layers(ExpertCounts* counts) const {
  for (const Placed& at : layers)
    at.layer.run(*ops, {.plane = at.plane, .state = at.state}, counts, at.routed);
}

void Transformer::State::for_each(FunctionRef<void(const PlacedWeights&, FeedForward::Kind)> use) const {
  use(*head, FeedForward::Kind::kDense);
  use(*final_norm, FeedForward::Kind::kDense);
  for (const Placed& at : layers) at.layer.for_each(use);
}

// Inputs that have tokens, as rows of one step. Errors name what does not fit.
std::vector<AttentionSequence> Transformer::State::take(std::span<const SequenceInput> inputs) const {
  std::vector<AttentionSequence> sequences;
  int tokens = 0;
  for (const SequenceInput& input : inputs) {
    if (input.tokens.empty()) continue;
    const int count = static_cast<int>(input.tokens.size());
    if (input.position < 0 || input.position + count > spec.context)
      fail("positions {} to {}: the model's context is {} tokens", input.position, input.position + count,
           spec.context);
    if (tokens + count > max_tokens)
      fail("{} tokens in one step, at most {} fit", tokens + count, max_tokens);
    for (const int32_t id : input.tokens)
      if (id < 0 || id >= spec.vocab) fail("token {}: the vocabulary has {}", id, spec.vocab);
    KT_CHECK(keeps.states.empty() || input.slot >= 0, "a sequence without a slot for its state");
    KT_CHECK(input.adapter == inputs.front().adapter, "adapters {} and {} in one step",
             inputs.front().adapter, input.adapter);
    KT_CHECK(input.adapter < std::ssize(loader.options().adapters), "adapter {} of {}", input.adapter,
             loader.options().adapters.size());
    sequences.push_back({.first = tokens,
                         .count = count,
                         .position = input.position,
                         .pages = input.pages,
                         .slot = input.slot});
    tokens += count;
  }
  return sequences;
}

std::string not_on_gpu(const ModelSpec& spec) {
  return text("{} has {}, and they do not run on a GPU yet; without `gpu` all of it runs on the CPU",
              spec.family, spec.host_only());
}

Transformer::Transformer(const Checkpoint& checkpoint, ModelSpec spec, std::shared_ptr<Ops> ops,
                         TransformerOptions options) {
  if (spec.layers.empty()) fail("{}: a model without layers", checkpoint.path());
  if (spec.host_only() && !ops->runs_all())
    fail_as(ErrorKind::kUnsupported, "{}: {}", checkpoint.path(), not_on_gpu(spec));
  std::unique_ptr<ExpertSource> own;
  if (spec.moe() && !options.experts) own = open_own_experts(checkpoint);
  const ExpertSource* experts = options.experts ? options.experts : own.get();
  const ExpertSource* routed = options.experts ? options.own_experts : own.get();
  const WeightOptions load{.precision = options.precision,
                           .max_tokens = options.max_tokens,
                           .linear_format = options.linear_format,
                           .linear_formats = std::move(options.linear_formats),
                           .routing = options.routing,
                           .linear_rounding = options.linear_rounding,
                           .hot = std::move(options.hot),
                           .adapters = std::move(options.adapters)};
  state_ =
      std::make_unique<State>(checkpoint, std::move(spec), std::move(ops), load, routed, options.kv_type);
  State& s = *state_;
  WeightLoader& loader = s.loader;
  s.embedding = loader.matrix(loader.rooted(s.spec.embedding), s.spec.vocab, s.spec.hidden);
  s.final_norm = loader.norm(loader.rooted(s.spec.final_norm), s.spec.hidden);
  s.head = loader.linear(loader.head(), s.spec.vocab, s.spec.hidden);
  s.place_layers();
  const int layers = static_cast<int>(s.layers.size());
  for (int i = 0; i < layers; ++i) {
    s.layers[static_cast<size_t>(i)].layer.load(experts);
    if (options.on_layer) options.on_layer(i + 1, layers);
  }
  for (const auto& adapter : loader.options().adapters) adapter->check_all_taken();
  s.idle = idle_tensors(checkpoint, s.spec, loader.read(), routed, loader.root());
  if (!s.ops->sizes_only()) s.ops->allocate(options.max_tokens);
}

Transformer::~Transformer() = default;
Transformer::Transformer(Transformer&&) noexcept = default;

const ModelSpec& Transformer::spec() const { return state_->spec; }
const IdleTensors& Transformer::idle() const { return state_->idle; }
int Transformer::max_tokens() const { return state_->max_tokens; }
int Transformer::adapters() const { return static_cast<int>(state_->loader.options().adapters.size()); }
const SequenceShape& Transformer::keeps() const { return state_->keeps; }
const Work& Transformer::work() const { return state_->ops->work(); }
const std::vector<StepPart>& Transformer::parts() const { return state_->ops->parts(); }
const ExpertCounts* Transformer::expert_counts() const { return state_->expert_counts.get(); }

size_t Transformer::packed_bytes() const {
  size_t bytes = 0;
  state_->for_each([&](const PlacedWeights& weights, FeedForward::Kind) { bytes += weights.packed_bytes(); });
  return bytes;
}

double Transformer::stored_bytes() const {
  double bytes = 0;
  state_->for_each([&](const PlacedWeights& weights, FeedForward::Kind) { bytes += weights.stored_bytes(); });
  return bytes;
}

int64_t Transformer::logit_rows(std::span<const SequenceInput> inputs) {
  int64_t rows = 0;
  for (const SequenceInput& input : inputs) rows += logit_tokens(input);
  return rows;
}

int Transformer::state_slots(int64_t pages, int sequences, std::optional<uint64_t> snapshots) const {
  const SequenceShape& keeps = state_->keeps;
  const uint64_t each = keeps.slot_bytes();
  if (each == 0) return 0;
  const uint64_t usual = std::max(static_cast<uint64_t>(pages) * keeps.page_bytes() / 8,
                                  2 * static_cast<uint64_t>(sequences) * each);
  // No more than there are pages: a snapshot is a page's.
  const auto count = std::min(snapshots.value_or(usual) / each, static_cast<uint64_t>(pages));
  return sequences + static_cast<int>(count);
}

std::unique_ptr<SequenceCache> Transformer::make_cache(int pages, int slots) const {
  return state_->ops->make_cache(state_->keeps, pages, slots);
}

void Transformer::forward(SequenceCache& cache, std::span<const SequenceInput> inputs, float* logits) {
  State& s = *state_;
  Ops& ops = *s.ops;
  KT_CHECK(!ops.sizes_only(), "a model without weights");
  const std::vector<AttentionSequence> sequences = s.take(inputs);
  if (sequences.empty()) return;
  const int tokens = sequences.back().first + sequences.back().count;
  std::vector<int32_t> ids;  // of all tokens
  std::vector<int> wanted;   // rows of tokens whose logits are
  size_t at = 0;
  for (const SequenceInput& input : inputs) {
    if (input.tokens.empty()) continue;
    const AttentionSequence& sequence = sequences[at++];
    ids.insert(ids.end(), input.tokens.begin(), input.tokens.end());
    for (int t = sequence.count - logit_tokens(input); t < sequence.count; ++t)
      wanted.push_back(sequence.first + t);
  }
  const bool alike = std::ssize(sequences) == tokens && std::ssize(wanted) == tokens;
  const StepScope scope(ops, {.sequences = sequences,
                              .tokens = tokens,
                              .cache = &cache,
                              .logits = logits,
                              .alike = alike,
                              .adapter = inputs.front().adapter});
  const RowTable table{.rows = s.embedding->n, .width = s.spec.hidden, .read = [&](int64_t row, float* to) {
                         s.loader.embed(*s.embedding, row, to);
                       }};
  ops.embed(table, ids, s.x);
  ops.repeat([&] {
    s.run_layers(s.expert_counts.get());
    if (wanted.empty()) return;
    ops.norm(s.x, *s.final_norm, s.spec.norm_eps, s.normed);
    ops.pick(s.normed, wanted);
    ops.project(*s.head, s.normed, static_cast<int>(wanted.size()), static_cast<float>(s.spec.logit_cap));
  });
}

StepNeeds Transformer::State::measure(std::span<const AttentionSequence> sequences, int tokens,
                                      int logit_rows) const {
  return ops->measure({.sequences = sequences, .tokens = tokens}, keeps, [&] {
    run_layers(nullptr);
    ops->project(*head, normed, logit_rows, static_cast<float>(spec.logit_cap));
  });
}

Work Transformer::decode_work(int sequences, int context) const {
  const std::vector<AttentionSequence> all(static_cast<size_t>(sequences),
                                           {.first = 0, .count = 1, .position = context - 1});
  return state_->measure(all, sequences, sequences).work;
}

// Of the largest step of such a use, beyond rows and logits.
StepNeeds Transformer::State::needs(const MemoryRequest& request) const {
  const int tokens = static_cast<int>(
      std::clamp<int64_t>(int64_t{request.context} * request.sequences, 1, int64_t{max_tokens}));
  const std::vector<AttentionSequence> all(static_cast<size_t>(request.sequences),
                                           {.first = 0, .count = 0, .position = request.context});
  return measure(all, tokens, request.sequences);
}

size_t Transformer::State::logit_bytes(const MemoryRequest& request) const {
  return static_cast<size_t>(request.sequences) * static_cast<size_t>(spec.vocab) * sizeof(float);
}

MemoryPlan Transformer::memory_plan(const MemoryRequest& request) const {
  const State& s = *state_;
  MemoryPlan plan;
  const auto in = [&](const Place& place) -> PlaceMemory& { return plan.at(place); };
  s.for_each([&](const PlacedWeights& weights, FeedForward::Kind kind) {
    for (int node = 0; node < s.ops->nodes(); ++node) {
      PlaceMemory& memory = in({.kind = Place::Kind::kNode, .index = node});
      (kind == FeedForward::Kind::kRouted ? memory.experts : memory.linears) += weights.packed_bytes(node);
    }
    if (const size_t bytes = weights.device_bytes()) in(s.ops->place()).linears += bytes;
    in(s.ops->place()).vectors += weights.plain_bytes();
  });
  in(kHost).vectors += s.loader.expert_bias_bytes();
  plan.embedding = s.embedding_bytes();
  const int64_t pages = ceil_div(int64_t{request.context}, kPageTokens) * request.sequences;
  const int slots = state_slots(pages, request.sequences, request.snapshots);
  in(s.ops->place()).kv_cache = static_cast<uint64_t>(pages) * s.keeps.page_bytes() +
                                static_cast<uint64_t>(slots) * s.keeps.slot_bytes();
  const StepNeeds needs = s.needs(request);
  in(s.ops->place()).workspace = needs.workspace + s.ops->row_bytes(s.max_tokens);
  PlaceMemory& host = in(kHost);
  host.workspace += needs.on_host + s.logit_bytes(request);
  host.loading = s.loader.loading_bytes() * static_cast<uint64_t>(s.ops->loading_threads());
  return plan;
}

// The loader counts biases that stand beside packed experts for all layers together. Dense MLPs say how many are
// theirs; the others are those of routed experts, which are alike.
size_t Transformer::State::biases_of_an_expert() const {
  size_t left = loader.expert_bias_bytes(), routed = 0;
  for (const Placed& at : layers) {
    const FeedForward& part = at.layer.feed_forward();
    left -= mlp_bias_bytes(part, spec.hidden);
    if (part.moe()) routed += static_cast<size_t>(part.moe()->experts);
  }
  return routed == 0 ? 0 : left / routed;
}

void Transformer::State::add_sizes(const Placed& at, PlacementSizes& out) const {
  const MoeSpec* const moe = at.layer.feed_forward().moe();
  PlacementSizes::Layer& sizes = out.layers.emplace_back();
  sizes.dense = mlp_bias_bytes(at.layer.feed_forward(), spec.hidden);
  sizes.page = at.layer.mixer().keeps(kv_type).page_bytes();
  sizes.page_int8 = std::min<uint64_t>(sizes.page, at.layer.mixer().keeps(KvType::kS8).page_bytes());
  sizes.state = at.layer.mixer().keeps(kv_type).slot_bytes();
  at.layer.for_each([&](const PlacedWeights& weights, FeedForward::Kind kind) {
    if (kind == FeedForward::Kind::kDense) {
      sizes.dense += weights.packed_bytes() + weights.plain_bytes();
      return;
    }
    sizes.experts = moe->experts;
    for (int node = 0; node < ops->nodes(); ++node)
      sizes.expert.push_back(weights.packed_bytes(node) / static_cast<size_t>(moe->experts));
    sizes.expert.front() += biases_of_an_expert();
  });
}

PlacementSizes Transformer::placement_sizes(const MemoryRequest& request) const {
  const State& s = *state_;
  const StepNeeds needs = s.needs(request);
  const bool on_device = s.ops->place().kind == Place::Kind::kGpu;
  PlacementSizes out{
      .model = s.spec.family,
      .layers = {},
      .embedding = s.embedding_bytes(),
      .head = 0,
      .page_tokens = kPageTokens,
      .workspace = s.ops->row_bytes(s.max_tokens) + (on_device ? needs.workspace : s.logit_bytes(request)),
      .host_workspace = on_device ? needs.on_host + s.logit_bytes(request) : needs.workspace};
  for (const PlacedWeights* weights : {static_cast<const PlacedWeights*>(s.head.get()),
                                       static_cast<const PlacedWeights*>(s.final_norm.get())})
    out.head += weights->packed_bytes() + weights->plain_bytes();
  for (const State::Placed& at : s.layers) s.add_sizes(at, out);
  return out;
}

}  // namespace kt::inline models
