// Linear attention by the gated delta rule: a short convolution over queries, keys and values, then for each head of
// values one matrix that every token decays and corrects. No keys are kept of tokens, only states of the sequence.
#include "models/mixer.h"

namespace kt::inline models {
namespace {

class DeltaMixer final : public Mixer {
 public:
  DeltaMixer(const DeltaSpec& spec, const LayerPlace& place)
      : Mixer(place),
        spec_(spec),
        joined_(rows("q", joined_width())),
        gates_(spec.mixed() ? joined_ : rows("k", value_width())),
        b_(rows("beta", both_in_b() ? 2 * spec.shape.value_heads : spec.shape.value_heads)),
        a_(both_in_b() ? b_ : rows("decay", spec.shape.value_heads)),
        mixed_(rows("mixed", spec.shape.width())),
        factors_(rows("factors", 3 * int64_t{spec.shape.value_heads})),
        heads_(rows("heads", value_width())) {
    Stage in{.input = place.normed, .k = place.hidden(), .matrices = {}};
    in.matrices.push_back({place.named(spec.names.joined), joined_.width});
    if (!spec.mixed()) in.matrices.push_back({place.named(spec.names.gates), gates_.width});
    Stage out{.input = heads_, .k = heads_.width, .matrices = {}};
    out.matrices.push_back({place.named(spec.names.out), place.hidden()});
    stages_.push_back(std::move(in));
    stages_.push_back(std::move(out));
  }

  SequenceShape keeps(KvType) const override {
    return {
        .planes = {},
        .states = {short_convolution_bytes(spec_.taps, spec_.shape.width()), delta_rule_bytes(spec_.shape)}};
  }

  void load_vectors() override {
    WeightLoader& loader = place_.loader;
    const DeltaSpec::Names& names = spec_.names;
    const int heads = spec_.shape.value_heads;
    // A decay close to one is a small number's exponential: these are read as routers are.
    b_proj_ = loader.exact_linear(place_.named(names.b), b_.width, place_.hidden());
    if (!both_in_b()) a_proj_ = loader.exact_linear(place_.named(names.a), a_.width, place_.hidden());
    taps_ = loader.taps(place_.named(names.convolution), spec_.shape.width(), spec_.taps);
    rates_ = loader.decay_rates(place_.named(names.rates), heads);
    steps_ = loader.vector(place_.named(names.steps), heads);
    norm_ = loader.vector(place_.named(names.norm) + ".weight", spec_.shape.value_dim);
  }

  void for_each(FunctionRef<void(const PlacedWeights&)> use) const override {
    Mixer::for_each(use);
    for (const PlacedWeights* weights : std::initializer_list<const PlacedWeights*>{
             b_proj_.get(), a_proj_.get(), taps_.get(), rates_.get(), steps_.get(), norm_.get()})
      if (weights) use(*weights);
  }

  void run(Ops& ops, const MixerStep& step) const override {
    if (step.stops_at(kIn)) return;
    multiply_in(ops);
    const DeltaShape& shape = spec_.shape;
    const int64_t keys = int64_t{shape.key_heads} * shape.key_dim;
    const int together = shape.value_heads / shape.key_heads;
    const int64_t group = spec_.mixed() ? group_width() : 0, values = int64_t{together} * shape.value_dim;
    // Heads of values side by side: as one group.
    const auto value_heads = [&](Rows rows, int64_t mixed_at, int64_t at) -> GroupedHeads {
      if (spec_.mixed()) return {.from = {rows, mixed_at}, .stride = group, .in_group = together};
      return {.from = {rows, at}, .in_group = shape.value_heads};
    };
    const auto key_heads = [&](int64_t mixed_at, int64_t at) -> GroupedHeads {
      if (spec_.mixed()) return {.from = {joined_, mixed_at}, .stride = group};
      return {.from = {joined_, at}, .stride = shape.key_dim};
    };
    const ShortConvolution::Part parts[] = {
        {.heads = key_heads(0, 0), .count = shape.key_heads, .width = shape.key_dim},
        {.heads = key_heads(shape.key_dim, keys), .count = shape.key_heads, .width = shape.key_dim},
        {.heads = value_heads(joined_, 2 * shape.key_dim, 2 * keys),
         .count = shape.value_heads,
         .width = shape.value_dim}};
    ops.convolve(
        {.state = step.state, .taps = spec_.taps, .weights = taps_.get(), .parts = parts, .out = mixed_});
    const auto number = [&](Rows rows, int64_t mixed_at) -> GroupedHeads {
      if (both_in_b()) return {.from = {rows, mixed_at}, .stride = 2 * together, .in_group = together};
      return {.from = rows, .in_group = shape.value_heads};
    };
    ops.delta_rule({.state = step.state + 1,
                    .shape = shape,
                    .qkv = mixed_,
                    .factors = factors_,
                    .b = number(b_, 0),
                    .a = number(a_, together),
                    .rates = rates_.get(),
                    .steps = steps_.get(),
                    .out = heads_});
    ops.gate_heads({.x = heads_,
                    .heads = shape.value_heads,
                    .count = shape.value_dim,
                    .norm = norm_.get(),
                    .norm_eps = place_.loader.spec().norm_eps,
                    .gates = value_heads(gates_, 2 * shape.key_dim + values, 0),
                    .kind = GateKind::kSilu});
    if (step.stops_at(kOut)) return;
    const LinearUse out{.weights = weights(kOut, 0), .x = heads_, .y = place_.out};
    ops.linear({&out, 1});
  }

 private:
  enum : size_t { kIn, kOut };

  bool both_in_b() const { return spec_.names.a.empty(); }
  Rows rows(const char* name, int64_t width) const { return place_.ops().rows(name, width); }
  int64_t value_width() const { return int64_t{spec_.shape.value_heads} * spec_.shape.value_dim; }
  int64_t group_width() const {  // of q | k | values | gates of one key head
    return 2 * (spec_.shape.key_dim + value_width() / spec_.shape.key_heads);
  }
  int64_t joined_width() const {
    return spec_.mixed() ? spec_.shape.key_heads * group_width() : spec_.shape.width();
  }

  void multiply_in(Ops& ops) const {
    std::vector<LinearUse> uses{{.weights = weights(kIn, 0), .x = place_.normed, .y = joined_}};
    if (!spec_.mixed()) uses.push_back({.weights = weights(kIn, 1), .x = place_.normed, .y = gates_});
    uses.push_back({.weights = b_proj_.get(), .x = place_.normed, .y = b_});
    if (a_proj_) uses.push_back({.weights = a_proj_.get(), .x = place_.normed, .y = a_});
    ops.linear(uses);
  }

  const DeltaSpec spec_;
  // Queries, keys and values, and where they are mixed gates too; b and a, perhaps both in b_; after the convolution.
  const Rows joined_, gates_, b_, a_, mixed_, factors_, heads_;
  std::unique_ptr<PlacedLinear> b_proj_, a_proj_;  // a_proj_ null where b_proj_ gives both
  std::unique_ptr<PlacedVector> taps_, rates_, steps_, norm_;
};

}  // namespace

std::unique_ptr<Mixer> make_delta_mixer(const DeltaSpec& spec, const LayerPlace& place) {
  return std::make_unique<DeltaMixer>(spec, place);
}

}  // namespace kt::inline models
