#include "weights/lora/gguf_adapter.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <map>

#include "base/error.h"
#include "weights/dialects/fused.h"
#include "weights/gguf/gguf_names.h"
#include "weights/gguf/gguf_writer.h"
#include "weights/linears.h"
#include "weights/lora/lora_file_state.h"

namespace kt::inline weights {
namespace {

// A pair of the file, in slices (experts, heads) or whole. `read` fills those of one slice: a [rank, in], b [out,
// rank].
struct GgufPair {
  std::string weight;
  int64_t slices = 0;  // 0: tensors of two dimensions
  int64_t rank = 0, in = 0, out = 0;
  double alpha = 1;
  std::function<void(int64_t slice, float* a, float* b)> read;
};

const GgufFamily* family_of(const Checkpoint& model) {
  if (model.is_gguf()) return model.gguf_family();
  const ModelConfig& config = model.config();
  for (const GgufFamily* const family : model.known_families())
    if (family->model_type == config.model_type || family->model_type == config.model_type + "_text")
      return family;
  for (const GgufFamily* const family : model.known_families())
    if (family->architecture == config.architecture) return family;
  return nullptr;
}

int64_t config_number(const Checkpoint& model, const char* key) {
  const int64_t value = number_in_config(model.config_json(), key).value_or(0);
  if (value < 1) fail("{}: config.json has no number {} of at least 1", model.path(), key);
  return value;
}

class GgufAdapterPlan {
 public:
  GgufAdapterPlan(const LoraFile& adapter, const Checkpoint& model, const GgufFamily& family)
      : adapter_(adapter), model_(model), family_(family) {
    for (const LinearModule& linear : find_linears(model, [](std::string_view) { return false; }))
      linears_.emplace(from_layers(linear.module), linear);
    for (const std::string& module : adapter.modules()) add_module(module);
    for (const int layer : adapter.expert_layers()) add_experts(layer);
    adapter.check_all_taken();
  }

  std::vector<GgufPair> pairs;
  std::vector<std::string> unused;

 private:
  [[noreturn]] void refuse(const std::string& module, std::string_view why) const {
    fail_as(ErrorKind::kUnsupported, "{}: {}: {}", adapter_.path(), module, why);
  }

  // A module that the model does not have stays untaken, and is told with its shape.
  void add_module(const std::string& module) {
    const auto linear = linears_.find(module);
    if (linear == linears_.end()) return;
    const auto matrix = open_linear(model_, linear->second);
    const auto factors = adapter_.stored(module, matrix->n, matrix->k, model_.config().experts);
    if (!factors) return;
    if (module.find(".linear_attn.") != module.npos)
      refuse(module, text("GGUF files of {} store recurrent layers in another form, and an adapter of one "
                          "cannot be written; merge it into the model",
                          family_.gguf));
    const std::string published = (module.starts_with("layers.") ? "model." : "") + module + ".weight";
    const std::optional<std::string> weight = gguf_name(&family_, published);
    if (!weight) refuse(module, text("GGUF files of {} have no such tensor", family_.gguf));
    if (module.ends_with(".kv_b_proj")) return add_halves(*weight, *factors, *matrix);
    const bool reordered =
        family_.interleaved && (module.ends_with(".q_proj") || module.ends_with(".k_proj"));
    const int64_t heads = !reordered                    ? 0
                          : module.ends_with(".q_proj") ? attention_heads(model_.config_json()).q
                                                        : attention_heads(model_.config_json()).kv;
    if (reordered && (heads < 1 || matrix->n % (2 * heads) != 0))
      refuse(module, text("{} rows are not {} heads of an even number of rows each", matrix->n, heads));
    pairs.push_back({.weight = *weight,
                     .rank = factors->rank,
                     .in = matrix->k,
                     .out = matrix->n,
                     .alpha = factors->alpha,
                     .read = [f = *factors, heads](int64_t, float* a, float* b) {
                       read_rows(f.a, 0, f.rank, a, f.a_name);
                       read_turned(f, heads, b);
                     }});
    const std::string latent = module.substr(0, module.rfind('.')) + ".kv_a_proj_with_mqa";
    if (module.find(".self_attn.") != module.npos && !module.ends_with(".o_proj") &&
        linears_.contains(latent))
      unused.push_back(*weight);
  }

  // Row h d + half d/2 + i is stored as row h d + 2 i + half.
  static void read_turned(const FactorViews& factors, int64_t heads, float* b) {
    const int64_t rank = factors.rank, half_rows = heads == 0 ? 0 : factors.b.rows / heads / 2;
    if (heads == 0) read_rows(factors.b, 0, factors.b.rows, b, factors.b_name);
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t half = 0; half < 2; ++half)
        for (int64_t i = 0; i < half_rows; ++i)
          read_rows(factors.b, (2 * h + half) * half_rows + i, 1, b + (2 * (h * half_rows + i) + half) * rank,
                    factors.b_name);
  }

  // kv_b, a slice for each head: of keys a = B_h^T and b = A^T, of values a = A and b = B_h.
  void add_halves(const std::string& weight, const FactorViews& factors, const StoredMatrix& matrix) {
    const int64_t heads = config_number(model_, "num_attention_heads"),
                  nope = config_number(model_, "qk_nope_head_dim"), v = config_number(model_, "v_head_dim");
    if (heads * (nope + v) != matrix.n)
      fail("{}: {} rows are not {} heads of {} and {}", matrix.name, matrix.n, heads, nope, v);
    const int64_t rank = factors.rank, k = matrix.k;
    const std::string stem = weight.substr(0, weight.rfind("attn_kv_b"));
    pairs.push_back({.weight = stem + "attn_k_b.weight",
                     .slices = heads,
                     .rank = rank,
                     .in = nope,
                     .out = k,
                     .alpha = factors.alpha,
                     .read = [factors, nope, v](int64_t head, float* a, float* b) {
                       LoraView rows = factors.b.part(head * (nope + v), nope, 0, factors.rank);
                       read_rows(transposed(rows), 0, factors.rank, a, factors.b_name);
                       read_rows(transposed(factors.a), 0, factors.a.columns, b, factors.a_name);
                     }});
    pairs.push_back({.weight = stem + "attn_v_b.weight",
                     .slices = heads,
                     .rank = rank,
                     .in = k,
                     .out = v,
                     .alpha = factors.alpha,
                     .read = [factors, nope, v](int64_t head, float* a, float* b) {
                       read_rows(factors.a, 0, factors.rank, a, factors.a_name);
                       read_rows(factors.b, head * (nope + v) + nope, v, b, factors.b_name);
                     }});
    for (const char* const half : {"attn_k_b.weight", "attn_v_b.weight"}) unused.push_back(stem + half);
  }

  static LoraView transposed(LoraView view) {
    std::swap(view.rows, view.columns);
    std::swap(view.row_stride, view.column_stride);
    return view;
  }

  using OfExperts = std::vector<std::optional<FactorViews>>;

  void add_experts(int layer) {
    const ModelConfig& config = model_.config();
    if (has_gate_and_up_in_turns(config))
      refuse(text("layers.{}.mlp.experts", layer),
             text("published experts of {} have gate and up in turns, and no GGUF adapter says that",
                  family_.gguf));
    std::array<OfExperts, 3> parts;
    for (const Projection projection : kProjections) {
      const bool down = projection == Projection::kDown;
      for (int e = 0; e < config.experts; ++e)
        parts[static_cast<size_t>(projection)].push_back(adapter_.stored(
            published_expert(&family_, layer, e, projection), down ? config.hidden : config.inter,
            down ? config.inter : config.hidden, config.experts));
    }
    separate(parts);
    for (const Projection projection : kProjections)
      add_projection(layer, projection, std::move(parts[static_cast<size_t>(projection)]));
  }

  // Gate and up that were joined: twice the rank, and each has zeros where the other's factors are.
  static void separate(std::array<OfExperts, 3>& parts) {
    auto& [gate, up, down] = parts;
    for (size_t e = 0; e < gate.size(); ++e) {
      if (!gate[e] || !up[e] || !down[e] || gate[e]->rank != 2 * down[e]->rank ||
          up[e]->rank != gate[e]->rank)
        return;
      const int64_t half = down[e]->rank;
      if (!gate[e]->b.part(0, gate[e]->b.rows, half, half).is_zero() ||
          !up[e]->b.part(0, up[e]->b.rows, 0, half).is_zero())
        return;
    }
    const auto keep = [](FactorViews& of, int64_t first) {
      of.rank /= 2;
      of.alpha /= 2;
      of.a = of.a.part(first, of.rank, 0, of.a.columns);
      of.b = of.b.part(0, of.b.rows, first, of.rank);
    };
    for (size_t e = 0; e < gate.size(); ++e) {
      keep(*gate[e], 0);
      keep(*up[e], up[e]->rank / 2);
    }
  }

  // Experts without factors get zeros.
  void add_projection(int layer, Projection projection, OfExperts experts) {
    const FactorViews* model = nullptr;
    for (const auto& one : experts) {
      if (!one) continue;
      if (!model) model = &*one;
      if (one->rank != model->rank || one->alpha != model->alpha)
        fail_as(ErrorKind::kUnsupported,
                "{}: rank {} and alpha {}, where other experts of layer {} have {} and {}", one->a_name,
                one->rank, one->alpha, layer, model->rank, model->alpha);
    }
    if (!model) return;
    GgufPair pair{.weight = text("blk.{}.ffn_{}_exps.weight", layer, name_of(projection)),
                  .slices = static_cast<int64_t>(experts.size()),
                  .rank = model->rank,
                  .in = model->a.columns,
                  .out = model->b.rows,
                  .alpha = model->alpha,
                  .read = {}};
    pair.read = [experts = std::move(experts), rank = pair.rank, in = pair.in, out = pair.out](
                    int64_t e, float* a, float* b) {
      const auto& of = experts[static_cast<size_t>(e)];
      std::fill_n(a, of ? 0 : rank * in, 0.0f);
      std::fill_n(b, of ? 0 : out * rank, 0.0f);
      if (!of) return;
      read_rows(of->a, 0, rank, a, of->a_name);
      read_rows(of->b, 0, out, b, of->b_name);
    };
    pairs.push_back(std::move(pair));
  }

  const LoraFile& adapter_;
  const Checkpoint& model_;
  const GgufFamily& family_;
  std::map<std::string, LinearModule, std::less<>> linears_;  // by names from "layers." on
};

void write_pairs(GgufWriter& writer, const std::vector<GgufPair>& pairs, double alpha) {
  for (size_t i = 0; i < pairs.size(); ++i) {
    const GgufPair& pair = pairs[i];
    std::vector<float> a(static_cast<size_t>(pair.rank * pair.in)),
        b(static_cast<size_t>(pair.out * pair.rank));
    const auto by = static_cast<float>(pair.alpha / alpha);
    for (int64_t slice = 0; slice < std::max<int64_t>(pair.slices, 1); ++slice) {
      pair.read(slice, a.data(), b.data());
      if (by != 1)
        for (float& value : b) value *= by;
      writer.write(2 * i, static_cast<uint64_t>(slice) * a.size(), a);
      writer.write(2 * i + 1, static_cast<uint64_t>(slice) * b.size(), b);
    }
  }
}

}  // namespace

GgufAdapterWritten export_gguf_adapter(const GgufAdapterExport& request) {
  const Checkpoint& model = *request.model;
  const GgufFamily* const family = family_of(model);
  if (!family)
    fail_as(ErrorKind::kUnsupported, "{}: model_type {} has no GGUF files that are known here; known: {}",
            model.path(), model.config().model_type.empty() ? "(none)" : model.config().model_type,
            gguf_architectures(model.known_families()));
  std::error_code ignored;
  if (!request.overwrite && std::filesystem::exists(request.to, ignored))
    fail("{}: is there already; `overwrite` replaces it", request.to);
  GgufAdapterPlan plan(*request.adapter, model, *family);
  std::vector<GgufTensorSpec> tensors;
  for (const GgufPair& pair : plan.pairs)
    for (const bool a : {true, false}) {
      std::vector<int64_t> shape = a ? std::vector{pair.rank, pair.in} : std::vector{pair.out, pair.rank};
      if (pair.slices > 0) shape.insert(shape.begin(), pair.slices);
      tensors.push_back({pair.weight + (a ? ".lora_a" : ".lora_b"), std::move(shape)});
    }
  const double alpha = plan.pairs.empty() ? 1 : plan.pairs.front().alpha;
  GgufWriter writer(request.to,
                    {{"general.architecture", std::string(family->gguf)},
                     {"general.type", std::string("adapter")},
                     {"general.file_type", uint32_t{0}},
                     {"adapter.type", std::string("lora")},
                     {"adapter.lora.alpha", static_cast<float>(alpha)}},
                    tensors);
  write_pairs(writer, plan.pairs, alpha);
  writer.commit();
  return {.architecture = std::string(family->gguf),
          .layers = static_cast<int>(request.adapter->expert_layers().size()),
          .experts = model.config().experts,
          .matrices = static_cast<int>(plan.pairs.size()),
          .bytes = writer.size(),
          .unused = std::move(plan.unused)};
}

}  // namespace kt::inline weights
