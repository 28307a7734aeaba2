#include "weights/plans/compressed_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/checked.h"
#include "base/error.h"
#include "base/log.h"
#include "weights/dialects/compressed.h"
#include "weights/gguf/gguf_names.h"
#include "weights/linears.h"
#include "weights/plans/compressed_targets.h"
#include "weights/plans/ignore_list.h"
#include "weights/plans/plan_parts.h"
#include "weights/plans/source_identity.h"

namespace kt::inline weights {
namespace {

// Quantises the whole matrix into tensors `base` (packed), base + 1 (scales) and base + 2 (shape).
void write_packed(const StoredMatrix& matrix, const PackedSpec& spec, size_t base, ShardOutput& out,
                  Scratch& scratch, WeightError& error) {
  const int64_t step = std::min(rows_at_once(matrix.k), matrix.n);
  const auto packed_row = static_cast<size_t>(spec.words(matrix.k)) * 4;
  const auto scale_row = static_cast<size_t>(spec.groups(matrix.k)) * spec.scale_bytes();
  scratch.values.resize(static_cast<size_t>(step * matrix.k));
  scratch.packed.resize(static_cast<size_t>(step) * packed_row);
  scratch.more.resize(static_cast<size_t>(step) * scale_row);
  for (int64_t first = 0; first < matrix.n; first += step) {
    const int64_t rows = std::min(step, matrix.n - first);
    matrix.values(first, rows, scratch.values.data());
    quantise_packed_rows(spec, rows, matrix.k, scratch.values.data(), matrix.k,
                         reinterpret_cast<uint32_t*>(scratch.packed.data()), scratch.more.data(), error,
                         matrix.name, first);
    const auto at = static_cast<size_t>(first), count = static_cast<size_t>(rows);
    out.write(base, at * packed_row, std::span(scratch.packed).first(count * packed_row));
    out.write(base + 1, at * scale_row, std::span(scratch.more).first(count * scale_row));
  }
  const int64_t shape[] = {matrix.n, matrix.k};
  out.write(base + 2, 0, std::as_bytes(std::span(shape)));
}

// The same of a matrix that was rounded before, with the error against what the source holds.
void write_rounded(const StoredMatrix& matrix, const Matrix& rounded, const PackedSpec& spec, size_t base,
                   ShardOutput& out, Scratch& scratch, WeightError& error) {
  KT_CHECK(rounded.n == matrix.n && rounded.k == matrix.k, "{}: rounded as [{}, {}]", matrix.name, rounded.n,
           rounded.k);
  const auto count = static_cast<size_t>(matrix.n);
  scratch.values.resize(count * static_cast<size_t>(matrix.k));
  scratch.packed.resize(count * static_cast<size_t>(spec.words(matrix.k)) * 4);
  scratch.more.resize(count * static_cast<size_t>(spec.groups(matrix.k)) * spec.scale_bytes());
  matrix.values(0, matrix.n, scratch.values.data());
  pack_matrix(spec, rounded.view(), scratch.values.data(), reinterpret_cast<uint32_t*>(scratch.packed.data()),
              scratch.more.data(), error);
  out.write(base, 0, scratch.packed);
  out.write(base + 1, 0, scratch.more);
  const int64_t shape[] = {matrix.n, matrix.k};
  out.write(base + 2, 0, std::as_bytes(std::span(shape)));
}

uint64_t packing_scratch(int64_t n, int64_t k) {
  const auto block = static_cast<uint64_t>(std::min(rows_at_once(k), n) * k);
  // f32 values, codes, scales, the row being rounded, and what values() unpacks for itself.
  return block * 16 + static_cast<uint64_t>(k) * 8;
}

// Where a module's three tensors begin, and how they are written.
struct PackedPlace {
  std::string module;
  PackedSpec spec;
  size_t base = 0;
  std::function<std::optional<Matrix>(const std::string&)> rounded;  // as in CompressedPlanOptions

  void write(const StoredMatrix& matrix, ShardOutput& out, Scratch& scratch, WeightError& error) const {
    if (const std::optional<Matrix> before = rounded ? rounded(module) : std::nullopt)
      return write_rounded(matrix, *before, spec, base, out, scratch, error);
    write_packed(matrix, spec, base, out, scratch, error);
  }
  // Of the worker that writes it.
  uint64_t scratch_bytes(int64_t n, int64_t k) const {
    return rounded ? static_cast<uint64_t>(n) * static_cast<uint64_t>(k) * 16 : packing_scratch(n, k);
  }
};

uint64_t stored_bytes(const StoredMatrix& matrix) {
  return static_cast<uint64_t>(stored_bits(matrix.format, matrix.n, matrix.k) *
                               static_cast<double>(matrix.n) * static_cast<double>(matrix.k) / 8);
}

class Planner {
 public:
  Planner(const Checkpoint& checkpoint, const ExpertSource* source, const CompressedPlanOptions& options)
      : checkpoint_(checkpoint), source_(source), options_(options), targets_(checkpoint, source, options) {}

  ConversionPlan plan();

 private:
  bool is_expert(std::string_view tensor) const;
  PackedPlace add_packed(ShardPlan& shard, const std::string& module, const PackedSpec& spec, int64_t n,
                         int64_t k);
  void add_expert(ShardPlan& shard, int layer, int expert, const PackedSpec& spec, bool biased);
  void add_experts();
  void add_linears();
  void add_rest();
  void warn_about_ignored() const;
  Json quantization_config() const;

  const Checkpoint& checkpoint_;
  const ExpertSource* source_;
  const CompressedPlanOptions& options_;
  const CompressedTargets targets_;
  std::set<std::string, std::less<>> stems_;  // of converted layers: "model.layers.3.mlp"
  std::map<int, ShardPlan> layers_;           // with something quantised
  ShardPlan rest_;
  std::set<const Tensor*> replaced_;  // not to be copied
  std::vector<std::string> quantised_, kept_;
  size_t experts_kept_ = 0, experts_quantised_ = 0;  // their matrices
};

std::string_view stem_of(std::string_view name) { return name.substr(0, name.find(".experts")); }

// Part of an expert that is converted; those of multi-token-prediction layers are not.
bool Planner::is_expert(std::string_view tensor) const {
  if (!source_ || !source_->owns(tensor)) return false;
  return checkpoint_.is_gguf() || stems_.contains(stem_of(tensor));
}

PackedPlace Planner::add_packed(ShardPlan& shard, const std::string& module, const PackedSpec& spec,
                                int64_t n, int64_t k) {
  check_packed(spec, n, k, module);
  const size_t base = shard.tensors.size();
  shard.tensors.push_back({module + ".weight_packed", Dtype::kI32, {n, spec.words(k)}});
  shard.tensors.push_back({module + ".weight_scale", spec.type, {n, spec.groups(k)}});
  shard.tensors.push_back({module + ".weight_shape", Dtype::kI64, {2}});
  quantised_.push_back(module);
  return {module, spec, base, options_.rounded};
}

void Planner::add_expert(ShardPlan& shard, int layer, int expert, const PackedSpec& spec, bool biased) {
  Piece piece;
  std::vector<std::pair<Projection, PackedPlace>> packed;
  std::vector<std::pair<Projection, size_t>> biases;
  for (const Projection projection : kProjections) {
    const bool down = projection == Projection::kDown;
    const int64_t n = down ? source_->hidden() : source_->inter();
    const int64_t k = down ? source_->inter() : source_->hidden();
    const std::string module = source_->module_name(layer, expert, projection);
    const auto open = [source = source_, layer, expert, projection] {
      return source->at(layer, expert, projection);
    };
    if (!targets_.expert(layer, expert, projection)) {
      const auto matrix = open();
      add_floats(shard, module + ".weight", spec.type, *matrix, stored_bytes(*matrix), open);
      kept_.push_back(module);
      ++experts_kept_;
    } else {
      ++experts_quantised_;
      packed.emplace_back(projection, add_packed(shard, module, spec, n, k));
      piece.scratch_bytes = std::max(piece.scratch_bytes, packed.back().second.scratch_bytes(n, k));
      piece.source_bytes += static_cast<uint64_t>(n) * static_cast<uint64_t>(k) * 2;
    }
    if (!biased) continue;
    biases.emplace_back(projection, shard.tensors.size());
    shard.tensors.push_back({module + ".bias", spec.type, {n}});
  }
  piece.run = [=, source = source_](ShardOutput& out, Scratch& scratch, PieceReport& report) {
    for (const auto& [projection, place] : packed) {
      WeightError& error = projection == Projection::kGate ? report.gate
                           : projection == Projection::kUp ? report.up
                                                           : report.down;
      place.write(*source->at(layer, expert, projection), out, scratch, error);
    }
    for (const auto& [projection, tensor] : biases) {
      const std::vector<float> values = source->bias(layer, expert, projection).value();
      scratch.packed.resize(values.size() * spec.scale_bytes());
      narrow(values, spec.type, scratch.packed.data());
      out.write(tensor, 0, scratch.packed);
    }
  };
  if (!packed.empty() || !biases.empty()) shard.pieces.push_back(std::move(piece));
}

void Planner::add_experts() {
  for (const int layer : source_->layers()) {
    ShardPlan& shard = layers_[layer];
    const PackedSpec spec = targets_.expert_spec(layer);
    const bool biased = source_->bias(layer, 0, Projection::kGate).has_value();
    for (int expert = 0; expert < source_->experts(); ++expert)
      add_expert(shard, layer, expert, spec, biased);
  }
}

void Planner::add_linears() {
  size_t widened = 0;
  for (const LinearModule& linear :
       find_linears(checkpoint_, [this](std::string_view tensor) { return is_expert(tensor); })) {
    if (is_extra_layer(checkpoint_, linear.module)) continue;
    const auto open = [&checkpoint = checkpoint_, linear] { return open_linear(checkpoint, linear); };
    if (targets_.linear(linear.module)) {
      const auto matrix = open();
      const int layer = layer_of(linear.module);
      ShardPlan& shard = layer < 0 ? rest_ : layers_[layer];
      const PackedSpec spec = targets_.spec_of(*matrix);
      const PackedPlace place = add_packed(shard, linear.module, spec, matrix->n, matrix->k);
      shard.pieces.push_back({.source_bytes = linear.bytes(),
                              .scratch_bytes = place.scratch_bytes(matrix->n, matrix->k),
                              .run = [=](ShardOutput& out, Scratch& scratch, PieceReport& report) {
                                place.write(*open(), out, scratch, report.gate);
                              }});
    } else {
      kept_.push_back(linear.module);
      if (!linear.quantised && !checkpoint_.is_gguf()) continue;
      const auto matrix = open();
      const Dtype type = linear.quantised ? Dtype::kBf16 : kept_type(*matrix);
      add_floats(rest_, linear.module + ".weight", type, *matrix, linear.bytes(), open);
      widened += linear.quantised ? 1 : 0;
    }
    replaced_.insert(linear.tensors.begin(), linear.tensors.end());
  }
  if (widened > 0)
    KT_LOG(LogLevel::kWarning,
           "{}: {} quantised weights that stay out of this conversion are written as bf16: a model has one "
           "quantisation",
           checkpoint_.path(), widened);
}

void Planner::add_rest() {
  if (checkpoint_.is_gguf())
    return add_gguf_rest(rest_, checkpoint_, [this](const Tensor& tensor) {
      return replaced_.contains(&tensor) || is_expert(tensor.name);
    });
  for (const Tensor& tensor : checkpoint_.tensors())
    if (!replaced_.contains(&tensor) && !is_expert(tensor.name)) add_copy(rest_, tensor);
}

Json Planner::quantization_config() const {
  const bool channel = options_.group_size == -1;
  const Json weights = {{"num_bits", options_.bits},
                        {"type", "int"},
                        {"symmetric", true},
                        {"strategy", channel ? "channel" : "group"},
                        {"group_size", channel ? Json() : Json(options_.group_size)},
                        {"block_structure", nullptr},
                        {"dynamic", false},
                        {"actorder", nullptr},
                        {"observer", "minmax"},
                        {"observer_kwargs", Json::object()}};
  const Json group = {{"targets", {"Linear"}},
                      {"weights", weights},
                      {"input_activations", nullptr},
                      {"output_activations", nullptr}};
  return {{"quant_method", "compressed-tensors"},
          {"format", "pack-quantized"},
          {"quantization_status", "compressed"},
          {"config_groups", {{"group_0", group}}},
          {"ignore", ignore_entries(kept_, quantised_, checkpoint_.config().layers)},
          {"kv_cache_scheme", nullptr}};
}

void Planner::warn_about_ignored() const {
  std::vector<std::string> all = quantised_;
  all.insert(all.end(), kept_.begin(), kept_.end());
  for (const std::string& pattern : ModulePatterns(options_.ignore).idle(all))
    KT_LOG(LogLevel::kWarning, "nothing is ignored by {}: no module's name has that; one is {}", pattern,
           all.front());
  if (experts_kept_ > 0 && experts_quantised_ > 0)
    KT_LOG(
        LogLevel::kWarning,
        "{} of {} matrices of experts stay as they are: transformers loads a model's experts only if all of "
        "them are quantised or none, kt only if all of a layer are",
        experts_kept_, experts_kept_ + experts_quantised_);
}

ConversionPlan Planner::plan() {
  if (options_.bits != 4 && options_.bits != 8) fail("{} bits: expected 4 or 8", options_.bits);
  if (options_.group_size != -1 && options_.group_size < 1)
    fail("group size {}: expected -1 or at least 1", options_.group_size);
  check_published_names(checkpoint_);
  if (source_) {
    for (const int layer : source_->layers())
      stems_.emplace(stem_of(source_->module_name(layer, 0, Projection::kGate)));
    add_experts();
  }
  add_linears();
  if (quantised_.empty())
    fail("{}: nothing to quantise: {}", checkpoint_.path(),
         source_ || options_.all_linears ? "every matrix is ignored" : "it has no experts");
  add_rest();
  warn_about_ignored();

  ConversionPlan plan;
  plan.input = checkpoint_.path();
  plan.output = options_.output;
  plan.settings = {{"kind", "compressed-tensors"},
                   {"bits", options_.bits},
                   {"group_size", options_.group_size},
                   {"targets", options_.all_linears ? "all" : "experts"},
                   {"ignore", options_.ignore},
                   {"version", options_.version},
                   {"source", source_settings(checkpoint_)},
                   {"contents", source_contents(checkpoint_)}};
  if (!options_.method.is_null()) plan.settings["method"] = options_.method;
  const size_t total = layers_.size() + (rest_.tensors.empty() ? 0 : 1);
  const auto take = [&](ShardPlan& shard, int layer) {
    shard.file = shard_name(plan.shards.size() + 1, total);
    shard.layer = layer;
    shard.metadata = {{"format", "pt"}, {"kt.version", options_.version}};
    plan.shards.push_back(std::move(shard));
  };
  for (auto& [layer, shard] : layers_) take(shard, layer);
  if (!rest_.tensors.empty()) take(rest_, -1);

  Json config = config_without_quantization(checkpoint_.config_json());
  if (checkpoint_.is_gguf() && config.contains("num_nextn_predict_layers"))
    config["num_nextn_predict_layers"] = 0;
  config["quantization_config"] = quantization_config();
  // What lies beside a GGUF file may belong to anything.
  if (!checkpoint_.is_gguf()) plan.side_files = side_files(checkpoint_.folder());
  plan.side_files.push_back({"config.json", config.dump(2) + "\n", ""});
  plan.check_source = [&checkpoint = checkpoint_] { checkpoint.check_unchanged(); };
  return plan;
}

}  // namespace

ConversionPlan plan_compressed(const Checkpoint& checkpoint, const ExpertSource* source,
                               const CompressedPlanOptions& options) {
  return Planner(checkpoint, source, options).plan();
}

}  // namespace kt::inline weights
