// Multi-head latent attention, absorbed: q . k = (absorbed q) . (latent), so the keys' half of kv_b moves to the
// side of the query and the values' half behind attention, and all heads share one vector of the cache. An indexer may
// choose which of them are seen.
#include "models/indexer.h"
#include "models/mixer.h"

namespace kt::inline models {
namespace {

class MlaMixer final : public Mixer {
 public:
  MlaMixer(const MlaSpec& spec, const LayerPlace& place)
      : Mixer(place),
        spec_(spec),
        rotation_(place.ops().make_rotation(spec.rope)),
        q_(rows("q", spec.heads * head())),
        k_(rows("k", kv_width())),
        rank_(rows("v", spec.q_rank)),
        latent_(rows("latent", spec.heads * kv_width())),
        context_(rows("heads", int64_t{spec.heads} * spec.kv_rank)),
        values_(rows("q", int64_t{spec.heads} * spec.v)) {  // queries are not needed any more
    if (spec.indexer) indexer_.emplace(*spec.indexer, place);
    const MlaSpec::Names& names = spec.names;
    Stage in{.input = place.normed, .k = place.hidden(), .matrices = {}};
    if (spec.q_rank > 0)
      in.matrices.push_back({place.named(names.q_a), spec.q_rank, spec.bias});
    else
      in.matrices.push_back({place.named(names.q), q_.width, false});
    in.matrices.push_back({place.named(names.kv_a), kv_width(), spec.bias});
    if (chooses()) in.matrices.push_back(indexer_->key_matrix());
    stages_.push_back(std::move(in));
    Stage rank{.input = rank_, .k = spec.q_rank, .matrices = {}};
    if (spec.q_rank > 0) rank.matrices.push_back({place.named(names.q_b), q_.width, false});
    if (chooses()) rank.matrices.push_back(indexer_->query_matrix());
    stages_.push_back(std::move(rank));
    Stage latent{.input = k_, .k = spec.kv_rank, .matrices = {}};
    latent.matrices.push_back({place.named(names.kv_b), int64_t{spec.heads} * (spec.nope + spec.v), false});
    stages_.push_back(std::move(latent));
    Stage out{.input = values_, .k = values_.width, .matrices = {}};
    out.matrices.push_back({place.named(names.o), place.hidden(), spec.bias});
    stages_.push_back(std::move(out));
  }

  SequenceShape keeps(KvType type) const override {
    SequenceShape out{
        .planes = {{.d = static_cast<int>(kv_width()), .dv = spec_.kv_rank, .shared = true, .type = type}},
        .states = {}};
    if (chooses()) out.planes.push_back(indexer_->plane(type));
    return out;
  }

  void load_vectors() override {
    const auto norm = [&](const std::string& name, int64_t size) {
      return place_.loader.vector(place_.named(name) + ".weight", size);
    };
    if (spec_.q_rank > 0) q_norm_ = norm(spec_.names.q_a_norm, spec_.q_rank);
    kv_norm_ = norm(spec_.names.kv_a_norm, spec_.kv_rank);
    if (chooses()) indexer_->load();
  }

  void for_each(FunctionRef<void(const PlacedWeights&)> use) const override {
    Mixer::for_each(use);
    for (const auto* heads : {&absorb_, &expand_})
      for (const auto& linear : *heads) use(*linear);
    if (q_norm_) use(*q_norm_);
    if (kv_norm_) use(*kv_norm_);
    if (indexer_) indexer_->for_each(use);
  }

  void run(Ops& ops, const MixerStep& step) const override {
    if (!make_query(ops, step)) return;
    ops.rotate_write({.plane = step.plane,
                      .rotation = rotation_,
                      .norm_eps = spec_.norm_eps,
                      .q = {.rows = q_, .heads = spec_.heads, .stride = head(), .rotated = spec_.nope},
                      .k = {.rows = k_,
                            .heads = 1,
                            .stride = kv_width(),
                            .rotated = spec_.kv_rank,
                            .norm = kv_norm_.get(),
                            .norms = 1},
                      .growth = spec_.growth});
    if (step.stops_at(kLatent)) return;
    if (chooses()) indexer_->choose(ops, step.plane + 1);
    std::vector<LinearUse> uses;
    for (int h = 0; h < spec_.heads; ++h)
      uses.push_back({.weights = absorb_[static_cast<size_t>(h)].get(),
                      .x = {q_, h * head()},
                      .y = {latent_, h * kv_width()}});
    ops.linear(uses);
    ops.copy_heads({.from = {q_, spec_.nope},
                    .to = {latent_, spec_.kv_rank},
                    .from_stride = head(),
                    .to_stride = kv_width(),
                    .heads = spec_.heads,
                    .count = spec_.rotated});
    ops.attend({.plane = step.plane,
                .q = latent_,
                .out = context_,
                .heads = spec_.heads,
                .scale = static_cast<float>(spec_.scale),
                .window = spec_.window,
                .seen = indexer_ ? indexer_->seen() : Rows{},
                .budget = indexer_ ? spec_.indexer->budget : 0,
                .exact = place_.loader.options().precision == Precision::kF32});
    uses.clear();
    for (int h = 0; h < spec_.heads; ++h)
      uses.push_back({.weights = expand_[static_cast<size_t>(h)].get(),
                      .x = {context_, int64_t{h} * spec_.kv_rank},
                      .y = {values_, int64_t{h} * spec_.v}});
    ops.linear(uses);
    if (step.stops_at(kOut)) return;
    const LinearUse out{.weights = weights(kOut, 0), .x = values_, .y = place_.out};
    ops.linear({&out, 1});
  }

 protected:
  void load_matrix(Stage& stage, Stage::Matrix& matrix) override {
    if (&stage == &stages_[kLatent])
      split_kv_b(stage, matrix);
    else
      Mixer::load_matrix(stage, matrix);
  }

 private:
  enum : size_t { kIn, kRank, kLatent, kOut };

  bool chooses() const { return indexer_ && !spec_.indexer->shared; }
  int64_t head() const { return spec_.nope + spec_.rotated; }
  int64_t kv_width() const { return spec_.kv_rank + spec_.rotated; }
  Rows rows(const char* name, int64_t width) const { return place_.ops().rows(name, width); }

  // Queries and latent vectors; false: somebody watched and needs no more.
  bool make_query(Ops& ops, const MixerStep& step) const {
    if (step.stops_at(kIn)) return false;
    const bool low_rank = spec_.q_rank > 0;
    std::vector<LinearUse> in = {{.weights = weights(kIn, 0), .x = place_.normed, .y = low_rank ? rank_ : q_},
                                 {.weights = weights(kIn, 1), .x = place_.normed, .y = k_}};
    if (chooses()) indexer_->add_key(weights(kIn, 2), in);
    ops.linear(in);
    if (!low_rank) return true;
    ops.norm(rank_, *q_norm_, spec_.norm_eps, rank_);
    if (step.stops_at(kRank)) return false;
    std::vector<LinearUse> up = {{.weights = weights(kRank, 0), .x = rank_, .y = q_}};
    if (chooses()) up.push_back({.weights = weights(kRank, 1), .x = rank_, .y = indexer_->q()});
    ops.linear(up);
    return true;
  }

  // kv_b is [heads, nope + v, kv_rank]: a head's keys go to the query's side transposed, its values after
  // attention.
  void split_kv_b(const Stage& stage, const Stage::Matrix& matrix) {
    const std::unique_ptr<StoredMatrix> stored = place_.loader.matrix(matrix.module, matrix.n, stage.k);
    const Precision precision = place_.loader.options().precision;
    const Format format = format_named(precision == Precision::kF32 ? "f32" : "bf16");
    const int64_t rank = spec_.kv_rank, nope = spec_.nope, v = spec_.v;
    // A head's values and its transposed keys, and half of them once more in plain order.
    place_.loader.will_take(static_cast<size_t>((2 * (nope + v) + nope) * rank) * sizeof(float));
    absorb_.resize(static_cast<size_t>(spec_.heads));
    expand_.resize(static_cast<size_t>(spec_.heads));
    Ops& ops = place_.ops();
    if (ops.sizes_only()) {
      const RowReader absorb{.format = format, .n = rank, .k = nope},
          expand{.format = format, .n = v, .k = rank};
      for (auto& linear : absorb_) linear = ops.make_linear(absorb, {}, precision, matrix.module);
      for (auto& linear : expand_) linear = ops.make_linear(expand, {}, precision, matrix.module);
      return adapt_kv_b(stage, matrix);
    }
    ops.spread(spec_.heads, [&](int64_t h) {
      std::vector<float> values(static_cast<size_t>((nope + v) * rank)),
          keys(static_cast<size_t>(nope * rank));
      stored->values(h * (nope + v), nope + v, values.data());
      for (int64_t i = 0; i < nope; ++i)
        for (int64_t j = 0; j < rank; ++j)
          keys[static_cast<size_t>(j * nope + i)] = values[static_cast<size_t>(i * rank + j)];
      const auto tail = std::span<const float>(values).subspan(static_cast<size_t>(nope * rank));
      absorb_[static_cast<size_t>(h)] =
          ops.make_linear(quantise(format, keys, rank, nope).view(), precision, matrix.module);
      expand_[static_cast<size_t>(h)] =
          ops.make_linear(quantise(format, tail, v, rank).view(), precision, matrix.module);
    });
    adapt_kv_b(stage, matrix);
  }

  // Rows of b are heads' keys and values like those of kv_b: b a is, of a head, b_keys a and b_values a, and the
  // first of them goes to the query's side transposed, a^T b_keys^T.
  void adapt_kv_b(const Stage& stage, const Stage::Matrix& matrix) {
    const int64_t rank = spec_.kv_rank, nope = spec_.nope, v = spec_.v;
    for (const LowRankFactors& factors : place_.loader.adapters(matrix.module, matrix.n, stage.k)) {
      const int64_t r = factors.rank;
      for (int64_t h = 0; h < spec_.heads; ++h) {
        LowRankFactors keys{.rank = factors.rank, .scale = factors.scale}, values = keys;
        if (r > 0) {
          const float* const b = factors.b.data() + h * (nope + v) * r;
          keys.a = transposed(b, nope, r);
          keys.b = transposed(factors.a.data(), r, rank);
          values.a = factors.a;
          values.b.assign(b + nope * r, b + (nope + v) * r);
        }
        const auto at = static_cast<size_t>(h);
        absorb_[at]->adapters.push_back(place_.loader.low_rank(keys, rank, nope, matrix.module));
        expand_[at]->adapters.push_back(place_.loader.low_rank(values, v, rank, matrix.module));
      }
    }
  }

  static std::vector<float> transposed(const float* from, int64_t rows, int64_t columns) {
    std::vector<float> out(static_cast<size_t>(rows * columns));
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) out[static_cast<size_t>(j * rows + i)] = from[i * columns + j];
    return out;
  }

  const MlaSpec spec_;
  const int rotation_;
  const Rows q_, k_, rank_, latent_, context_, values_;
  std::optional<Indexer> indexer_;  // none: all keys are seen
  std::unique_ptr<PlacedVector> q_norm_, kv_norm_;
  std::vector<std::unique_ptr<PlacedLinear>> absorb_;  // [heads] nope -> kv_rank: keys' half, transposed
  std::vector<std::unique_ptr<PlacedLinear>> expand_;  // [heads] kv_rank -> v
};

}  // namespace

std::unique_ptr<Mixer> make_mla_mixer(const MlaSpec& spec, const LayerPlace& place) {
  return std::make_unique<MlaMixer>(spec, place);
}

}  // namespace kt::inline models
