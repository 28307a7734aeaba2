// From a checkpoint to the weights of a spec: which tensors it asks for, their shapes checked, everything
// packed. What building a Transformer and walking its layers share; not for other files.
#pragma once
#include <algorithm>
#include <map>

#include "base/error.h"
#include "models/load_experts.h"
#include "models/transformer_state.h"
#include "weights/gguf/gguf_names.h"
#include "weights/linears.h"
#include "weights/requantise.h"

namespace kt {

// A matrix of attention, where it goes and what it multiplies.
struct AttentionLinear {
  AttentionInput input = AttentionInput::kNormed;
  std::string module;
  int64_t n = 0, k = 0;
  bool bias = false;
  Linear* into = nullptr;  // null: kv_b, which is run in halves
};

// A gated MLP that every token visits: a dense layer's own, or the shared expert.
struct DenseMlp {
  std::string gate, up, down;  // modules
  int inter = 0;
  Activation activation;
};

struct TransformerLoader {
  const Checkpoint& checkpoint;
  Transformer::State& s;
  const ExpertSource* experts;  // null: routers are read, routed experts are not
  std::map<std::string, LinearModule, std::less<>> modules;
  std::string root;  // what stands for the leading "model." of the spec's names

  std::string rooted(const std::string& name) const {
    return name.starts_with("model.") ? root + name.substr(6) : name;
  }
  std::string in_layer(int layer, const std::string& name) const {
    return text("{}.{}.{}", rooted(s.spec.prefix), layer, name);
  }

  // What the checkpoint calls that tensor.
  std::string stored(const std::string& name) const { return stored_name(checkpoint, name); }

  // Every matrix outside routed experts. Before anything else.
  void find_modules(const ExpertSource* own) {
    for (LinearModule& module :
         find_linears(checkpoint, [&](std::string_view name) { return own && own->owns(name); })) {
      std::string name = module.module;
      modules.emplace(std::move(name), std::move(module));
    }
    find_root();
  }

  // Models inside larger ones keep their names behind another prefix.
  void find_root() {
    for (const char* candidate : {"model.", "language_model.model.", "model.language_model.", ""}) {
      root = candidate;
      if (checkpoint.find(stored(rooted(s.spec.embedding) + ".weight"))) return;
    }
    root = "model.";
    checkpoint.at(stored(s.spec.embedding + ".weight"));  // says that it is missing
  }

  // The head stands beside "model.", within a larger model too.
  std::string head() const {
    if (s.spec.tied_embeddings) return rooted(s.spec.embedding);
    const std::string within = "language_model." + s.spec.head;
    return modules.contains(within) ? within : s.spec.head;
  }

  std::vector<float> vector(const std::string& name, int64_t size) const {
    const auto check = [&](int64_t found) {
      if (found != size)
        fail("{}: expected {} floats, found {}", stored(name), size, describe(checkpoint.at(stored(name))));
    };
    if (s.options.sizes_only) {
      check(elements(checkpoint.at(stored(name)).shape));
      return std::vector<float>(static_cast<size_t>(size));
    }
    std::vector<float> values = read_vector(checkpoint, name);
    check(static_cast<int64_t>(values.size()));
    return values;
  }

  std::unique_ptr<StoredMatrix> matrix(const std::string& module, int64_t n, int64_t k) const {
    const auto found = modules.find(module);
    if (found == modules.end()) {
      const Tensor& tensor = checkpoint.at(stored(module + ".weight"));
      fail("{}: expected a matrix, found {}", tensor.name, describe(tensor));
    }
    std::unique_ptr<StoredMatrix> opened = open_linear(checkpoint, found->second);
    if (opened->n != n || opened->k != k)
      fail("{}: expected [{}, {}], found [{}, {}]", opened->name, n, k, opened->n, opened->k);
    const MatrixRounding& rounding = s.options.linear_rounding;
    return rounding ? rounding(std::move(opened), module) : std::move(opened);
  }

  // In the format asked for, for matrices whose rounding a user may choose.
  std::unique_ptr<StoredMatrix> dense_matrix(const std::string& module, int64_t n, int64_t k) const {
    std::unique_ptr<StoredMatrix> stored = matrix(module, n, k);
    const auto& format = s.options.linear_format;
    return format && !(stored->format == *format) ? requantised(std::move(stored), *format)
                                                  : std::move(stored);
  }

  void will_load(std::initializer_list<const StoredMatrix*> together) const {
    s.loading_bytes = std::max(s.loading_bytes, loading_bytes({together.begin(), together.size()}));
  }

  LinearOptions linear_options(Precision precision) const {
    return {.precision = precision, .kernels = s.kernels, .sizes_only = s.options.sizes_only};
  }

  Linear packed(const StoredMatrix& stored, const std::string& module, bool bias, Precision precision) const {
    const std::vector<float> biases = bias ? vector(module + ".bias", stored.n) : std::vector<float>{};
    will_load({&stored});
    return {*s.pool, reader_of(stored), biases, linear_options(precision), module};
  }

  Linear linear(const std::string& module, int64_t n, int64_t k, bool bias = false) const {
    return packed(*dense_matrix(module, n, k), module, bias, s.options.precision);
  }

  // Of scores that are compared or squashed, close numbers all: as stored, and always in f32.
  Linear exact_linear(const std::string& module, int64_t n, int64_t k, bool bias = false) const {
    return packed(*matrix(module, n, k), module, bias, Precision::kF32);
  }

  std::optional<DenseMlp> dense_mlp(int layer, const LayerSpec& spec) const {
    const LayerNames& names = s.spec.names;
    if (!spec.moe)
      return DenseMlp{in_layer(layer, names.gate), in_layer(layer, names.up), in_layer(layer, names.down),
                      spec.dense_inter, s.spec.activation};
    if (s.spec.moe.shared_inter == 0) return std::nullopt;
    const std::string shared = in_layer(layer, names.shared);
    return DenseMlp{shared + ".gate_proj", shared + ".up_proj", shared + ".down_proj",
                    s.spec.moe.shared_inter, s.spec.moe.activation};
  }

  // As the only expert of a layer.
  Experts mlp(const DenseMlp& of) const {
    const int64_t hidden = s.spec.hidden;
    auto g = dense_matrix(of.gate, of.inter, hidden), u = dense_matrix(of.up, of.inter, hidden),
         d = dense_matrix(of.down, hidden, of.inter);
    if (!(g->format == u->format)) {  // one of them was left as it was when the other was rounded
      const Format common = format_named("f32");
      g = requantised(std::move(g), common);
      u = requantised(std::move(u), common);
    }
    will_load({g.get(), u.get(), d.get()});
    Experts out(s.pool, s.workspace, {.experts = 1, .hidden = s.spec.hidden, .inter = of.inter},
                {.gate = g->format,
                 .up = u->format,
                 .down = d->format,
                 .activation = of.activation,
                 .precision = s.options.precision,
                 .max_tokens = s.options.max_tokens,
                 .kernels = s.kernels,
                 .sizes_only = s.options.sizes_only});
    if (!s.options.sizes_only)
      out.load_together(0, {.gate = reader_of(*g), .up = reader_of(*u), .down = reader_of(*d)});
    return out;
  }

  // Of layer number `layer`, into w; in the order of computing.
  std::vector<AttentionLinear> attention_linears(int layer, LayerWeights& w) const {
    const LayerNames& names = s.spec.names;
    const int64_t hidden = s.spec.hidden;
    using enum AttentionInput;
    if (w.gqa) {
      const GqaSpec& spec = s.spec.gqa;
      const int64_t q = int64_t{spec.heads} * spec.head_dim, kv = int64_t{spec.kv_heads} * spec.head_dim;
      return {{kNormed, in_layer(layer, names.q), q, hidden, spec.qkv_bias, &w.gqa->q},
              {kNormed, in_layer(layer, names.k), kv, hidden, spec.qkv_bias, &w.gqa->k},
              {kNormed, in_layer(layer, names.v), kv, hidden, spec.qkv_bias, &w.gqa->v},
              {kHeads, in_layer(layer, names.o), hidden, q, spec.o_bias, &w.gqa->o}};
    }
    const MlaSpec& spec = s.spec.mla;
    const int64_t q = int64_t{spec.heads} * (spec.nope + spec.rope), v = int64_t{spec.heads} * spec.v;
    std::vector<AttentionLinear> out;
    if (spec.q_rank > 0) {
      out.push_back({kNormed, in_layer(layer, names.q_a), spec.q_rank, hidden, spec.bias, &w.mla->q_a});
      out.push_back({kQueryRank, in_layer(layer, names.q_b), q, spec.q_rank, false, &w.mla->q_b});
    } else {
      out.push_back({kNormed, in_layer(layer, names.q), q, hidden, false, &w.mla->q});
    }
    out.push_back(
        {kNormed, in_layer(layer, names.kv_a), spec.kv_rank + spec.rope, hidden, spec.bias, &w.mla->kv_a});
    out.push_back({kLatent, in_layer(layer, names.kv_b), int64_t{spec.heads} * (spec.nope + spec.v),
                   spec.kv_rank, false, nullptr});
    out.push_back({kHeads, in_layer(layer, names.o), hidden, v, spec.bias, &w.mla->o});
    std::ranges::stable_sort(out, {}, &AttentionLinear::input);
    return out;
  }

  void load(const AttentionLinear& of, LayerWeights& w) const {
    if (of.into) {
      *of.into = linear(of.module, of.n, of.k, of.bias);
    } else {
      split_kv_b(of.module, *w.mla);
    }
  }

  void gqa_vectors(int layer, GqaWeights& w) const {
    const GqaSpec& spec = s.spec.gqa;
    const LayerNames& names = s.spec.names;
    const int64_t q = int64_t{spec.heads} * spec.head_dim, kv = int64_t{spec.kv_heads} * spec.head_dim;
    if (spec.norm != GqaSpec::Norm::kNone) {
      const bool all = spec.norm == GqaSpec::Norm::kAll;
      w.q_norm = vector(in_layer(layer, names.q_norm) + ".weight", all ? q : spec.head_dim);
      w.k_norm = vector(in_layer(layer, names.k_norm) + ".weight", all ? kv : spec.head_dim);
    }
    if (spec.sinks) w.sinks = vector(in_layer(layer, names.sinks), spec.heads);
  }

  void mla_vectors(int layer, MlaWeights& w) const {
    const MlaSpec& spec = s.spec.mla;
    const LayerNames& names = s.spec.names;
    if (spec.q_rank > 0) w.q_a_norm = vector(in_layer(layer, names.q_a_norm) + ".weight", spec.q_rank);
    w.kv_a_norm = vector(in_layer(layer, names.kv_a_norm) + ".weight", spec.kv_rank);
  }

  // kv_b is [heads, nope + v, kv_rank]: a head's keys go to the query's side transposed, its values after
  // attention.
  void split_kv_b(const std::string& name, MlaWeights& w) const {
    const MlaSpec& spec = s.spec.mla;
    const int64_t rows = spec.nope + spec.v;
    const std::unique_ptr<StoredMatrix> stored = matrix(name, spec.heads * rows, spec.kv_rank);
    const Format format = format_named(s.options.precision == Precision::kF32 ? "f32" : "bf16");
    const LinearOptions options = linear_options(s.options.precision);
    // A head's values and its transposed keys, and half of them once more in plain order.
    s.loading_bytes =
        std::max(s.loading_bytes, static_cast<size_t>((2 * rows + spec.nope) * spec.kv_rank) * sizeof(float));
    w.absorb.resize(static_cast<size_t>(spec.heads));
    w.expand.resize(static_cast<size_t>(spec.heads));
    const RowReader absorb{.format = format, .n = spec.kv_rank, .k = spec.nope},
        expand{.format = format, .n = spec.v, .k = spec.kv_rank};
    if (s.options.sizes_only) {
      for (Linear& linear : w.absorb) linear = Linear(*s.pool, absorb, {}, options, name);
      for (Linear& linear : w.expand) linear = Linear(*s.pool, expand, {}, options, name);
      return;
    }
    run_items(*s.pool, spec.heads, [&](int64_t h) {
      std::vector<float> head(static_cast<size_t>(rows * spec.kv_rank)),
          keys(static_cast<size_t>(spec.nope) * static_cast<size_t>(spec.kv_rank));
      stored->values(h * rows, rows, head.data());
      for (int i = 0; i < spec.nope; ++i)
        for (int j = 0; j < spec.kv_rank; ++j)
          keys[static_cast<size_t>(j) * static_cast<size_t>(spec.nope) + static_cast<size_t>(i)] =
              head[static_cast<size_t>(i) * static_cast<size_t>(spec.kv_rank) + static_cast<size_t>(j)];
      const std::span<const float> values(head.data() + int64_t{spec.nope} * spec.kv_rank,
                                          static_cast<size_t>(spec.v) * static_cast<size_t>(spec.kv_rank));
      const Pool& pool = *s.pool;
      w.absorb[static_cast<size_t>(h)] =
          Linear(pool, quantise(format, keys, absorb.n, absorb.k).view(), {}, options, name);
      w.expand[static_cast<size_t>(h)] =
          Linear(pool, quantise(format, values, expand.n, expand.k).view(), {}, options, name);
    });
  }

  // What reading a layer's experts takes, and biases, which are not packed with them.
  void size_experts(int layer) const {
    const auto gate = experts->at(layer, 0, Projection::kGate), up = experts->at(layer, 0, Projection::kUp),
               down = experts->at(layer, 0, Projection::kDown);
    will_load({gate.get(), up.get(), down.get()});
    int64_t floats = 0;
    for (const Projection projection : kProjections)
      if (experts->bias(layer, 0, projection))
        floats += projection == Projection::kDown ? experts->hidden() : experts->inter();
    s.expert_bias_bytes += static_cast<size_t>(experts->experts() * floats) * sizeof(float);
  }

  void routed(int layer, LayerWeights& w) const {
    const MoeSpec& spec = s.spec.moe;
    if (experts->experts() != spec.experts || experts->hidden() != s.spec.hidden ||
        experts->inter() != spec.inter)
      fail("{}: the config has {} experts of {} x {}, the weights {} of {} x {}", checkpoint.path(),
           spec.experts, s.spec.hidden, spec.inter, experts->experts(), experts->hidden(), experts->inter());
    w.routed.emplace(s.pool, s.workspace, experts_shape(*experts),
                     experts_options(*experts, layer,
                                     {.activation = spec.activation,
                                      .precision = s.options.precision,
                                      .max_tokens = s.options.max_tokens,
                                      .kernels = s.kernels,
                                      .sizes_only = s.options.sizes_only}));
    size_experts(layer);
    if (!s.options.sizes_only) load_experts(*experts, layer, *s.pool, *w.routed);
  }

  void moe(int layer, LayerWeights& w) const {
    const MoeSpec& spec = s.spec.moe;
    const LayerNames& names = s.spec.names;
    w.router = exact_linear(in_layer(layer, names.router), spec.experts, s.spec.hidden, spec.router.bias);
    if (spec.router.correction_bias)
      w.correction = vector(in_layer(layer, names.correction_bias), spec.experts);
    if (experts) routed(layer, w);
    if (spec.shared_inter > 0 && spec.shared_gate)
      w.shared_gate = exact_linear(in_layer(layer, names.shared_gate), 1, s.spec.hidden);
  }

  // Layer number i of the checkpoint, made as `spec` says.
  LayerWeights layer(int i, const LayerSpec& spec) const {
    const LayerNames& names = s.spec.names;
    LayerWeights w;
    w.input_norm = vector(in_layer(i, names.input_norm) + ".weight", s.spec.hidden);
    w.post_norm = vector(in_layer(i, names.post_norm) + ".weight", s.spec.hidden);
    if (spec.mla) {
      mla_vectors(i, w.mla.emplace());
    } else {
      gqa_vectors(i, w.gqa.emplace());
    }
    for (const AttentionLinear& of : attention_linears(i, w)) load(of, w);
    if (spec.moe) moe(i, w);
    if (const std::optional<DenseMlp> of = dense_mlp(i, spec)) w.dense.emplace(mlp(*of));
    return w;
  }

  void buffers() const {
    const auto tokens = static_cast<size_t>(s.options.max_tokens);
    for (const auto& [buffer, width] : s.float_buffers()) buffer->resize(tokens * static_cast<size_t>(width));
    for (const auto& [buffer, width] : s.id_buffers()) buffer->resize(tokens * static_cast<size_t>(width));
    std::fill(s.ones.begin(), s.ones.end(), 1.0f);
  }
};

}  // namespace kt
