// Grouped-query attention: every few heads of queries share a head of keys and values.
#include "models/mixer.h"

namespace kt::inline models {
namespace {

class GqaMixer final : public Mixer {
 public:
  GqaMixer(const GqaSpec& spec, const LayerPlace& place)
      : Mixer(place),
        spec_(spec),
        rotation_(place.ops().make_rotation(spec.rope)),
        q_(place.ops().rows("q", int64_t{spec.heads} * spec.head_dim)),
        k_(place.ops().rows("k", int64_t{spec.kv_heads} * spec.head_dim)),
        v_(place.ops().rows("v", k_.width)),
        heads_(place.ops().rows("heads", q_.width)),
        queries_(spec.gated ? place.ops().rows("queries", 2 * q_.width) : q_) {
    const GqaSpec::Names& names = spec.names;
    Stage in{.input = place.normed, .k = place.hidden(), .matrices = {}};
    in.matrices.push_back({place.named(names.q), queries_.width, spec.qkv_bias});
    in.matrices.push_back({place.named(names.k), k_.width, spec.qkv_bias});
    if (!spec.keys_as_values) in.matrices.push_back({place.named(names.v), v_.width, spec.qkv_bias});
    Stage out{.input = heads_, .k = heads_.width, .matrices = {}};
    out.matrices.push_back({place.named(names.o), place.hidden(), spec.o_bias});
    stages_.push_back(std::move(in));
    stages_.push_back(std::move(out));
  }

  SequenceShape keeps(KvType type) const override {
    return {.planes = {{.heads = spec_.kv_heads, .d = spec_.head_dim, .dv = spec_.head_dim, .type = type}},
            .states = {}};
  }

  void load_vectors() override {
    const auto vector = [&](const std::string& name, int64_t size) {
      return place_.loader.vector(place_.named(name), size);
    };
    const auto norm = [&](const std::string& name, int heads) {
      return place_.loader.norm(place_.named(name), spec_.head_dim * norms(heads).size);
    };
    if (norm_last()) {
      const std::vector<float> ones(static_cast<size_t>(spec_.head_dim), 1.0f);
      q_norm_ = place_.ops().make_vector(ones);
      k_norm_ = place_.ops().make_vector(ones);
    } else if (spec_.norm != GqaSpec::Norm::kNone) {
      q_norm_ = norm(spec_.names.q_norm, spec_.heads);
      k_norm_ = norm(spec_.names.k_norm, spec_.kv_heads);
    }
    if (spec_.v_norm)
      v_norm_ = place_.ops().make_vector(std::vector<float>(static_cast<size_t>(spec_.head_dim), 1.0f));
    if (spec_.sinks) sinks_ = vector(spec_.names.sinks, spec_.heads);
  }

  void for_each(FunctionRef<void(const PlacedWeights&)> use) const override {
    Mixer::for_each(use);
    for (const PlacedVector* vector : {q_norm_.get(), k_norm_.get(), v_norm_.get(), sinks_.get()})
      if (vector) use(*vector);
  }

  void run(Ops& ops, const MixerStep& step) const override {
    if (step.stops_at(kIn)) return;
    const bool v = !spec_.keys_as_values;  // has a matrix of its own
    const LinearUse in[] = {{.weights = weights(kIn, 0), .x = place_.normed, .y = queries_},
                            {.weights = weights(kIn, 1), .x = place_.normed, .y = k_},
                            {.weights = v ? weights(kIn, 2) : nullptr, .x = place_.normed, .y = v_}};
    ops.linear({in, v ? std::size(in) : 2});
    if (!v)
      ops.copy_heads({.from = k_,
                      .to = v_,
                      .from_stride = spec_.head_dim,
                      .to_stride = spec_.head_dim,
                      .heads = spec_.kv_heads,
                      .count = spec_.head_dim});
    if (spec_.gated)  // a head's queries, then its gates
      ops.copy_heads({.from = queries_,
                      .to = q_,
                      .from_stride = 2 * spec_.head_dim,
                      .to_stride = spec_.head_dim,
                      .heads = spec_.heads,
                      .count = spec_.head_dim});
    ops.rotate_write({.plane = step.plane,
                      .rotation = rotation_,
                      .norm_eps = place_.loader.spec().norm_eps,
                      .norm_last = norm_last(),
                      .q = heads_of(q_, spec_.heads, q_norm_.get()),
                      .k = heads_of(k_, spec_.kv_heads, k_norm_.get()),
                      .v = v_,
                      .v_norm = v_norm_.get(),
                      .growth = spec_.growth});
    ops.attend({.plane = step.plane,
                .q = q_,
                .out = heads_,
                .heads = spec_.heads,
                .scale = static_cast<float>(spec_.scale),
                .window = spec_.window,
                .chunk = spec_.chunk,
                .sinks = sinks_.get(),
                .exact = place_.loader.options().precision == Precision::kF32});
    if (spec_.gated)
      ops.gate_heads({.x = heads_,
                      .heads = spec_.heads,
                      .count = spec_.head_dim,
                      .gates = {.from = {queries_, spec_.head_dim}, .stride = 2 * spec_.head_dim},
                      .kind = GateKind::kSigmoid});
    if (step.stops_at(kOut)) return;
    const LinearUse out{.weights = weights(kOut, 0), .x = heads_, .y = place_.out};
    ops.linear({&out, 1});
  }

 private:
  enum : size_t { kIn, kOut };

  bool norm_last() const { return spec_.norm == GqaSpec::Norm::kHeadLast; }
  // Of so many heads: how many of them one norm covers, and how many norms there are.
  struct Norms {
    int size, count;
  };
  Norms norms(int heads) const {
    return spec_.norm == GqaSpec::Norm::kAll ? Norms{heads, 1} : Norms{1, heads};
  }
  HeadRows heads_of(Rows rows, int heads, const PlacedVector* norm) const {
    return {.rows = rows,
            .heads = heads,
            .stride = spec_.head_dim,
            .norm = norm,
            .norms = norm ? norms(heads).count : 0};
  }

  const GqaSpec spec_;
  const int rotation_;
  const Rows q_, k_, v_, heads_;
  const Rows queries_;  // with gates, where there are any; else q_
  std::unique_ptr<PlacedVector> q_norm_, k_norm_, v_norm_, sinks_;  // null: none
};

}  // namespace

std::unique_ptr<Mixer> make_gqa_mixer(const GqaSpec& spec, const LayerPlace& place) {
  return std::make_unique<GqaMixer>(spec, place);
}

}  // namespace kt::inline models
