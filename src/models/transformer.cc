#include "models/transformer.h"

#include <algorithm>
#include <set>

#include "base/checked.h"
#include "base/error.h"
#include "models/placement.h"
#include "models/segment.h"
#include "models/unread_tensors.h"

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

}  // namespace

struct Transformer::State {
  const ModelSpec spec;
  const int max_tokens;
  const KvType kv_type;
  std::vector<std::unique_ptr<Segment>> segments;  // one at least; the last has the head
  IdleTensors idle;
  std::unique_ptr<StoredMatrix> embedding;  // rows are read as tokens need them
  SequenceShape keeps;
  std::unique_ptr<ExpertCounts> expert_counts;  // null: no layer routes
  std::vector<float> passing;                   // [tokens, hidden] from one segment to the next
  // Of several segments, what all did so far.
  Work work;
  std::vector<StepPart> parts;

  State(ModelSpec of, const WeightOptions& options, KvType kv)
      : spec(std::move(of)), max_tokens(options.max_tokens), kv_type(kv) {}

  bool sizes_only() const { return segments.front()->ops().sizes_only(); }
  void place_layers(std::span<const PlacedLayers> places);
  void load_layers(const ExpertSource* experts, const std::function<void(int, int)>& on_layer);
  std::set<std::string> read() const;  // tensors, by all segments
  uint64_t embedding_bytes() const;
  std::vector<AttentionSequence> take(std::span<const SequenceInput> inputs) const;
  void for_each(FunctionRef<void(const PlacedWeights&, FeedForward::Kind)> use) const;
  std::vector<StepNeeds> needs(const MemoryRequest& request) const;  // by segment
  size_t logit_bytes(const MemoryRequest& request) const;
  void add_up();
};

void Transformer::State::place_layers(std::span<const PlacedLayers> places) {
  std::vector<int> routing;
  int first = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    segments[i]->place(first, places[i].layers, routing);
    first += places[i].layers;
    const SequenceShape& more = segments[i]->keeps();
    keeps.planes.insert(keeps.planes.end(), more.planes.begin(), more.planes.end());
    keeps.states.insert(keeps.states.end(), more.states.begin(), more.states.end());
  }
  KT_CHECK(first == std::ssize(spec.layers), "{} layers placed, {} there are", first, spec.layers.size());
  if (const MoeSpec* moe = spec.moe())
    expert_counts = std::make_unique<ExpertCounts>(std::move(routing), moe->experts, moe->top_k);
}

void Transformer::State::load_layers(const ExpertSource* experts,
                                     const std::function<void(int, int)>& on_layer) {
  int done = 0;
  for (const auto& segment : segments)
    for (Segment::Placed& at : segment->layers()) {
      at.layer.load(experts);
      if (on_layer) on_layer(++done, static_cast<int>(spec.layers.size()));
    }
}

std::set<std::string> Transformer::State::read() const {
  std::set<std::string> out;
  for (const auto& segment : segments)
    out.insert(segment->loader().read().begin(), segment->loader().read().end());
  return out;
}

uint64_t Transformer::State::embedding_bytes() const {
  const auto values = static_cast<double>(embedding->n) * static_cast<double>(embedding->k);
  return static_cast<uint64_t>(values / 8 * stored_bits(embedding->format, embedding->n, embedding->k));
}

void Transformer::State::for_each(FunctionRef<void(const PlacedWeights&, FeedForward::Kind)> use) const {
  for (const auto& segment : segments) segment->for_each(use);
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
    KT_CHECK(input.adapter < std::ssize(segments.front()->loader().options().adapters), "adapter {} of {}",
             input.adapter, segments.front()->loader().options().adapters.size());
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
                         TransformerOptions options)
    : Transformer(checkpoint, ModelSpec(spec),
                  {{.ops = std::move(ops), .layers = static_cast<int>(spec.layers.size())}},
                  std::move(options)) {}

Transformer::Transformer(const Checkpoint& checkpoint, ModelSpec spec, std::vector<PlacedLayers> places,
                         TransformerOptions options) {
  if (spec.layers.empty()) fail("{}: a model without layers", checkpoint.path());
  KT_CHECK(!places.empty(), "a model in no place");
  for (const PlacedLayers& place : places)
    if (spec.host_only() && !place.ops->runs_all())
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
  state_ = std::make_unique<State>(std::move(spec), load, options.kv_type);
  State& s = *state_;
  for (PlacedLayers& place : places)
    s.segments.push_back(
        std::make_unique<Segment>(checkpoint, s.spec, std::move(place.ops), load, routed, s.kv_type));
  WeightLoader& loader = s.segments.front()->loader();
  s.embedding = loader.matrix(loader.rooted(s.spec.embedding), s.spec.vocab, s.spec.hidden);
  s.segments.back()->load_head();
  s.place_layers(places);
  s.load_layers(experts, options.on_layer);
  for (const auto& adapter : loader.options().adapters) adapter->check_all_taken();
  s.idle = idle_tensors(checkpoint, s.spec, s.read(), routed, loader.root());
  if (s.sizes_only()) return;
  for (const auto& segment : s.segments) segment->ops().allocate(options.max_tokens);
  if (s.segments.size() > 1)
    s.passing.resize(static_cast<size_t>(options.max_tokens) * static_cast<size_t>(s.spec.hidden));
}

Transformer::~Transformer() = default;
Transformer::Transformer(Transformer&&) noexcept = default;

const ModelSpec& Transformer::spec() const { return state_->spec; }
const IdleTensors& Transformer::idle() const { return state_->idle; }
int Transformer::max_tokens() const { return state_->max_tokens; }
int Transformer::adapters() const {
  return static_cast<int>(state_->segments.front()->loader().options().adapters.size());
}
const SequenceShape& Transformer::keeps() const { return state_->keeps; }
const Work& Transformer::work() const {
  return state_->segments.size() == 1 ? state_->segments.front()->ops().work() : state_->work;
}
const std::vector<StepPart>& Transformer::parts() const {
  return state_->segments.size() == 1 ? state_->segments.front()->ops().parts() : state_->parts;
}
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
  const State& s = *state_;
  if (s.segments.size() == 1) return s.segments.front()->ops().make_cache(s.keeps, pages, slots);
  std::vector<std::unique_ptr<SequenceCache>> parts;
  for (const auto& segment : s.segments)
    parts.push_back(segment->layers().empty() ? nullptr
                                              : segment->ops().make_cache(segment->keeps(), pages, slots));
  return std::make_unique<SegmentCaches>(s.keeps, pages, slots, std::move(parts));
}

void Transformer::forward(SequenceCache& cache, std::span<const SequenceInput> inputs, float* logits) {
  State& s = *state_;
  KT_CHECK(!s.sizes_only(), "a model without weights");
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
  StepRows step{.sequences = sequences,
                .tokens = tokens,
                .cache = &cache,
                .logits = logits,
                .alike = std::ssize(sequences) == tokens && std::ssize(wanted) == tokens,
                .adapter = inputs.front().adapter};
  const RowTable table{.rows = s.embedding->n, .width = s.spec.hidden, .read = [&](int64_t row, float* to) {
                         s.segments.front()->loader().embed(*s.embedding, row, to);
                       }};
  const std::span<float> passing =
      std::span(s.passing).first(s.passing.empty() ? 0 : ids.size() * static_cast<size_t>(s.spec.hidden));
  for (size_t i = 0; i < s.segments.size(); ++i) {
    const Segment& segment = *s.segments[i];
    Ops& ops = segment.ops();
    if (s.segments.size() > 1) step.cache = static_cast<SegmentCaches&>(cache).part(i);
    const bool ends = segment.has_head() && !wanted.empty();
    if (segment.layers().empty() && !ends) continue;
    const StepScope scope(ops, step);
    if (i == 0)
      ops.embed(table, ids, segment.x());
    else
      ops.write(passing, segment.x());
    ops.repeat([&] {
      segment.run(s.expert_counts.get());
      if (ends) segment.run_head(wanted);
    });
    if (i + 1 < s.segments.size()) ops.read(segment.x(), passing);
  }
  if (s.segments.size() > 1) s.add_up();
}

// Segments' parts have one name where they do one thing; which came first stays first.
void Transformer::State::add_up() {
  work = {};
  for (StepPart& part : parts) part = {.name = std::move(part.name)};
  for (const auto& segment : segments) {
    work += segment->ops().work();
    for (const StepPart& more : segment->ops().parts()) {
      const auto found = std::ranges::find(parts, more.name, &StepPart::name);
      StepPart& part = found != parts.end() ? *found : parts.emplace_back(StepPart{.name = more.name});
      part.calls += more.calls;
      part.seconds += more.seconds;
      part.amount += more.amount;
    }
  }
}

Work Transformer::decode_work(int sequences, int context) const {
  const std::vector<AttentionSequence> all(static_cast<size_t>(sequences),
                                           {.first = 0, .count = 1, .position = context - 1});
  Work out;
  for (const auto& segment : state_->segments) out += segment->measure(all, sequences, sequences).work;
  return out;
}

// Of the largest step of such a use, beyond rows and logits.
std::vector<StepNeeds> Transformer::State::needs(const MemoryRequest& request) const {
  const int tokens = static_cast<int>(
      std::clamp<int64_t>(int64_t{request.context} * request.sequences, 1, int64_t{max_tokens}));
  const std::vector<AttentionSequence> all(static_cast<size_t>(request.sequences),
                                           {.first = 0, .count = 0, .position = request.context});
  std::vector<StepNeeds> out;
  for (const auto& segment : segments) out.push_back(segment->measure(all, tokens, request.sequences));
  return out;
}

size_t Transformer::State::logit_bytes(const MemoryRequest& request) const {
  return static_cast<size_t>(request.sequences) * static_cast<size_t>(spec.vocab) * sizeof(float);
}

MemoryPlan Transformer::memory_plan(const MemoryRequest& request) const {
  const State& s = *state_;
  MemoryPlan plan;
  const auto in = [&](const Place& place) -> PlaceMemory& { return plan.at(place); };
  plan.embedding = s.embedding_bytes();
  const int64_t pages = ceil_div(int64_t{request.context}, kPageTokens) * request.sequences;
  const int slots = state_slots(pages, request.sequences, request.snapshots);
  const std::vector<StepNeeds> needs = s.needs(request);
  for (size_t i = 0; i < s.segments.size(); ++i) {
    const Segment& segment = *s.segments[i];
    const Ops& ops = segment.ops();
    segment.for_each([&](const PlacedWeights& weights, FeedForward::Kind kind) {
      for (int node = 0; node < ops.nodes(); ++node) {
        PlaceMemory& memory = in({.kind = Place::Kind::kNode, .index = node});
        (kind == FeedForward::Kind::kRouted ? memory.experts : memory.linears) += weights.packed_bytes(node);
      }
      if (const size_t bytes = weights.device_bytes()) in(ops.place()).linears += bytes;
      in(ops.place()).vectors += weights.plain_bytes();
    });
    in(kHost).vectors += segment.loader().expert_bias_bytes();
    PlaceMemory& here = in(ops.place());
    here.kv_cache += static_cast<uint64_t>(pages) * segment.keeps().page_bytes() +
                     static_cast<uint64_t>(slots) * segment.keeps().slot_bytes();
    here.workspace += needs[i].workspace + ops.row_bytes(s.max_tokens);
    PlaceMemory& host = in(kHost);
    host.workspace += needs[i].on_host;
    host.loading = std::max<uint64_t>(
        host.loading, segment.loader().loading_bytes() * static_cast<uint64_t>(ops.loading_threads()));
  }
  PlaceMemory& host = in(kHost);
  host.workspace += s.logit_bytes(request);
  if (s.segments.size() > 1)
    host.workspace +=
        static_cast<uint64_t>(s.max_tokens) * static_cast<uint64_t>(s.spec.hidden) * sizeof(float);
  return plan;
}

PlacementSizes Transformer::placement_sizes(const MemoryRequest& request) const {
  const State& s = *state_;
  KT_CHECK(s.segments.size() == 1, "sizes to place by of a model that is placed");
  const Segment& segment = *s.segments.front();
  const StepNeeds needs = s.needs(request).front();
  const uint64_t rows = segment.ops().row_bytes(s.max_tokens);
  const bool on_device = segment.ops().place().kind == Place::Kind::kGpu;
  PlacementSizes out{.model = s.spec.family,
                     .layers = {},
                     .embedding = s.embedding_bytes(),
                     .head = 0,
                     .page_tokens = kPageTokens,
                     .workspace = rows + (on_device ? needs.workspace : s.logit_bytes(request)),
                     .host_workspace = on_device ? needs.on_host + s.logit_bytes(request) : needs.workspace};
  segment.add_sizes(out);
  return out;
}

}  // namespace kt::inline models
