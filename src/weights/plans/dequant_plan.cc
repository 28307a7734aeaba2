#include "weights/plans/dequant_plan.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/checked.h"
#include "base/error.h"
#include "weights/dialects/dialects.h"
#include "weights/dialects/expert_names.h"
#include "weights/dialects/fused.h"
#include "weights/experts.h"
#include "weights/kt/kt_names.h"
#include "weights/linears.h"
#include "weights/lora/adapted_matrix.h"
#include "weights/lora/expert_lora.h"
#include "weights/plans/ignore_list.h"
#include "weights/plans/plan_parts.h"
#include "weights/plans/source_identity.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;

// An expert's columns are written this many rows of the transpose at a time.
constexpr int64_t kTransposedRows = 64;

std::string file_name(const std::string& path) { return fs::path(path).filename().string(); }

// Whether each file of the checkpoint is wanted.
std::vector<bool> chosen_files(const Checkpoint& checkpoint, const std::vector<std::string>& wanted) {
  std::vector<bool> chosen(checkpoint.files().size(), wanted.empty());
  for (const std::string& want : wanted) {
    bool found = false;
    for (size_t i = 0; i < chosen.size(); ++i)
      if (file_name(checkpoint.files()[i]) == file_name(want)) chosen[i] = found = true;
    if (!found) fail("{}: not a file of {}", want, checkpoint.path());
  }
  return chosen;
}

// Fused experts as blocks and scales: one expert's slice as a matrix [2I, H].
std::unique_ptr<StoredMatrix> open_slice(const Checkpoint& checkpoint, const Tensor& blocks,
                                         const Tensor& scales, int expert) {
  const ExpertTensor tensors[] = {{.suffix = "blocks", .tensor = &blocks},
                                  {.suffix = "scales", .tensor = &scales}};
  const Module module{
      .name = blocks.name, .tensors = tensors, .expert = expert, .config = &checkpoint.config()};
  return plane_matrix(text("{}[{}]", blocks.name, expert), read_module_bytes(module).planes);
}

// The matrix [n, k] as bf16 [k, n] into tensor `index`, at `offset` bytes.
void write_transposed(const StoredMatrix& matrix, size_t index, uint64_t offset, ShardOutput& out,
                      Scratch& scratch) {
  const auto n = static_cast<size_t>(matrix.n), k = static_cast<size_t>(matrix.k);
  scratch.values.resize(n * k);
  matrix.values(0, matrix.n, scratch.values.data());
  scratch.scales.resize(n * kTransposedRows);
  scratch.packed.resize(n * kTransposedRows * 2);
  for (size_t first = 0; first < k; first += kTransposedRows) {
    const size_t rows = std::min<size_t>(kTransposedRows, k - first);
    for (size_t column = 0; column < n; ++column)
      for (size_t row = 0; row < rows; ++row)
        scratch.scales[row * n + column] = scratch.values[column * k + first + row];
    narrow({scratch.scales.data(), rows * n}, Dtype::kBf16, scratch.packed.data());
    out.write(index, offset + first * n * 2, std::span(scratch.packed).first(rows * n * 2));
  }
}

void add_fused(ShardPlan& shard, const Checkpoint& checkpoint, const Tensor& blocks, const Tensor& scales) {
  if (blocks.shape.size() < 3 || blocks.shape[0] < 1)
    fail("{}: expected [experts, rows, blocks, bytes], found {}", blocks.name, describe(blocks));
  const int64_t experts = blocks.shape[0];
  const auto first = open_slice(checkpoint, blocks, scales, 0);
  const int64_t size = checked_mul(first->n, first->k, blocks.name);
  const size_t index = shard.tensors.size();
  shard.tensors.push_back({blocks.name.substr(0, blocks.name.size() - std::string_view("_blocks").size()),
                           Dtype::kBf16,
                           {experts, first->k, first->n}});
  for (int64_t expert = 0; expert < experts; ++expert)
    shard.pieces.push_back({.source_bytes = blocks.bytes.size() / static_cast<size_t>(experts),
                            .scratch_bytes = static_cast<uint64_t>(size) * 8 +
                                             static_cast<uint64_t>(first->n) * kTransposedRows * 6,
                            .run = [&checkpoint, &blocks, &scales, expert, index, size](
                                       ShardOutput& out, Scratch& scratch, PieceReport&) {
                              write_transposed(
                                  *open_slice(checkpoint, blocks, scales, static_cast<int>(expert)), index,
                                  static_cast<uint64_t>(expert * size) * 2, out, scratch);
                            }});
}

// --- an adapter's factors ---

std::optional<FactorViews> factors_of(const LoraFile* adapter, const Checkpoint& checkpoint,
                                      std::string_view module, const StoredMatrix& matrix) {
  if (!adapter) return {};
  return adapter->stored(module, matrix.n, matrix.k, checkpoint.config().experts);
}

// As add_floats, of the matrix with what the adapter adds.
void add_with(ShardPlan& shard, std::string name, Dtype type, const StoredMatrix& shape,
              uint64_t source_bytes, const MatrixOpener& open, const std::optional<FactorViews>& factors) {
  if (!factors) return add_floats(shard, std::move(name), type, shape, source_bytes, open);
  add_floats(shard, std::move(name), Dtype::kBf16, shape, source_bytes,
             [open, factors = *factors] { return adapted(open(), factors); });
  shard.pieces.back().scratch_bytes +=
      static_cast<uint64_t>(factors->rank + 1) * static_cast<uint64_t>(shape.k) * 4;
}

// A slice [rows, columns] of a tensor of floats in three dimensions, from `first` on.
std::unique_ptr<StoredMatrix> open_rows(const Checkpoint& checkpoint, const Tensor& tensor, int64_t expert,
                                        int64_t first, int64_t count) {
  Tensor part = tensor;
  const int64_t columns = tensor.shape[2];
  const size_t width = static_cast<size_t>(dtype_bits(tensor.dtype)) / 8;
  part.shape = {count, columns};
  part.bytes = tensor.bytes.subspan(static_cast<size_t>((expert * tensor.shape[1] + first) * columns) * width,
                                    static_cast<size_t>(count * columns) * width);
  const ExpertTensor tensors[] = {{.suffix = "weight", .tensor = &part}};
  const Module module{.name = tensor.name, .tensors = tensors, .config = &checkpoint.config()};
  return plane_matrix(text("{}[{}]", tensor.name, expert), read_module_bytes(module).planes);
}

// One projection of an expert in a tensor for all: these rows of its slice.
struct FusedPart {
  std::string module;  // "model.layers.3.mlp.experts.7.up_proj"
  int64_t first = 0, rows = 0;
};

std::vector<FusedPart> parts_of(const Tensor& tensor, int64_t expert) {
  const size_t dot = tensor.name.rfind('.');
  const std::string stem = text("{}.{}.", tensor.name.substr(0, dot), expert);
  const int64_t rows = tensor.shape[1];
  if (tensor.name.substr(dot + 1) == "down_proj") return {{stem + "down_proj", 0, rows}};
  return {{stem + "gate_proj", 0, rows / 2}, {stem + "up_proj", rows / 2, rows / 2}};
}

bool is_fused_floats(const Tensor& tensor) {
  return (tensor.name.ends_with(".experts.gate_up_proj") || tensor.name.ends_with(".experts.down_proj")) &&
         tensor.shape.size() == 3 &&
         (tensor.dtype == Dtype::kBf16 || tensor.dtype == Dtype::kF16 || tensor.dtype == Dtype::kF32);
}

// Whether rows of both tensors are outputs, gate's before up's.
bool is_in_order(const Checkpoint& checkpoint, const Tensor& tensor) {
  const std::string stem = tensor.name.substr(0, tensor.name.rfind('.') + 1);
  const Tensor* const gate_up = checkpoint.find(stem + "gate_up_proj");
  const Tensor* const down = checkpoint.find(stem + "down_proj");
  if (!gate_up || !down) return false;
  const ExpertTensor gates[] = {{.part = static_cast<uint8_t>(NamedPart::kGateUp), .tensor = gate_up}};
  const ExpertTensor downs[] = {{.part = static_cast<uint8_t>(NamedPart::kDown), .tensor = down}};
  const FusedStyle style = fused_style(gates, downs, checkpoint.config());
  return !style.transposed && !style.interleaved;
}

// An expert's slice, a piece: of each projection the rows with what the adapter adds.
void add_fused_floats(ShardPlan& shard, const Checkpoint& checkpoint, const Tensor& tensor,
                      const LoraFile& adapter) {
  const size_t index = shard.tensors.size();
  shard.tensors.push_back({tensor.name, Dtype::kBf16, tensor.shape});
  const int64_t columns = tensor.shape[2], slice = tensor.shape[1] * columns;
  for (int64_t expert = 0; expert < tensor.shape[0]; ++expert) {
    std::vector<std::pair<FusedPart, std::optional<FactorViews>>> parts;
    int rank = 0;
    for (FusedPart& part : parts_of(tensor, expert)) {
      auto factors = adapter.stored(part.module, part.rows, columns, checkpoint.config().experts);
      if (factors) rank = std::max(rank, factors->rank);
      parts.emplace_back(std::move(part), std::move(factors));
    }
    const int64_t rows = std::min(rows_at_once(columns), tensor.shape[1]);
    shard.pieces.push_back(
        {.source_bytes = tensor.bytes.size() / static_cast<size_t>(tensor.shape[0]),
         .scratch_bytes =
             static_cast<uint64_t>(rows * columns) * 16 + static_cast<uint64_t>((rank + 1) * columns) * 4,
         .run = [&checkpoint, &tensor, parts = std::move(parts), expert, index, slice, columns](
                    ShardOutput& out, Scratch& scratch, PieceReport&) {
           for (const auto& [part, factors] : parts) {
             auto matrix = open_rows(checkpoint, tensor, expert, part.first, part.rows);
             if (factors) matrix = adapted(std::move(matrix), *factors);
             write_floats_at(*matrix, Dtype::kBf16, index,
                             static_cast<uint64_t>(expert * slice + part.first * columns) * 2, out, scratch);
           }
         }});
  }
}

bool is_kt_array(const Tensor& tensor) { return parse_kt_tensor_name(tensor.name).has_value(); }

Json config_for(const Checkpoint& checkpoint, const DequantPlanOptions& options) {
  Json config = config_without_quantization(options.config_path.empty() ? checkpoint.config_json()
                                                                        : read_json(options.config_path));
  for (const char* key : {"torch_dtype", "dtype"})
    if (config.contains(key)) config[key] = "bfloat16";
  if (checkpoint.is_gguf() && config.contains("num_nextn_predict_layers"))
    config["num_nextn_predict_layers"] = 0;
  return config;
}

// All but the shards and what lies beside the source.
ConversionPlan begin_plan(const Checkpoint& checkpoint, const DequantPlanOptions& options) {
  ConversionPlan plan;
  plan.input = checkpoint.path();
  plan.output = options.output;
  plan.settings = {{"kind", "dequant"},
                   {"files", options.files},
                   {"version", options.version},
                   {"source", source_settings(checkpoint)},
                   {"contents", source_contents(checkpoint)}};
  if (!options.config_path.empty()) plan.settings["config"] = file_digest(options.config_path);
  if (options.adapter) {
    plan.settings["kind"] = "merged";
    for (const char* const name : {kAdapterConfigFile, kAdapterModelFile, kOtherExpertsFile})
      plan.settings["adapter"][name] = file_digest(options.adapter->path() + "/" + name);
  }
  plan.side_files.push_back({"config.json", config_for(checkpoint, options).dump(2) + "\n", ""});
  plan.check_source = [&checkpoint] { checkpoint.check_unchanged(); };
  return plan;
}

class DequantPlanner {
 public:
  DequantPlanner(const Checkpoint& checkpoint, const DequantPlanOptions& options)
      : checkpoint_(checkpoint), options_(options), chosen_(chosen_files(checkpoint, options.files)) {
    for (const std::string& path : checkpoint.files()) {
      ShardPlan shard;
      shard.file = file_name(path);
      shard.metadata = {{"format", "pt"}, {"kt.version", options.version}};
      shards_.push_back(std::move(shard));
    }
  }

  ConversionPlan plan();

 private:
  ShardPlan* shard_of(const Tensor& tensor) {
    const auto file = static_cast<size_t>(tensor.file);
    return chosen_[file] ? &shards_[file] : nullptr;
  }
  void add_linears();
  void add_fused_experts();
  void add_adapted_fused();
  bool has_factors(const Tensor& tensor) const;
  void refuse_factors(const Tensor& tensor) const;
  void add_rest();

  const Checkpoint& checkpoint_;
  const DequantPlanOptions& options_;
  std::vector<bool> chosen_;
  std::vector<ShardPlan> shards_;     // [files]
  std::set<const Tensor*> replaced_;  // not to be copied
};

void DequantPlanner::add_linears() {
  for (const LinearModule& linear : find_linears(checkpoint_, [](std::string_view) { return false; })) {
    if (!linear.quantised && !options_.adapter) continue;
    const auto open = [&checkpoint = checkpoint_, linear] { return open_linear(checkpoint, linear); };
    const auto matrix = open();
    const auto factors = factors_of(options_.adapter, checkpoint_, linear.module, *matrix);
    if (!linear.quantised && !factors) continue;
    replaced_.insert(linear.tensors.begin(), linear.tensors.end());
    if (ShardPlan* shard = shard_of(*linear.main))
      add_with(*shard, linear.module + ".weight", Dtype::kBf16, *matrix, linear.bytes(), open, factors);
  }
}

void DequantPlanner::add_fused_experts() {
  for (const Tensor& blocks : checkpoint_.tensors()) {
    if (!blocks.name.ends_with("_blocks")) continue;
    const std::string stem = blocks.name.substr(0, blocks.name.size() - std::string_view("blocks").size());
    const Tensor* scales = checkpoint_.find(stem + "scales");
    if (!scales) continue;
    replaced_.insert({&blocks, scales});
    refuse_factors(blocks);
    if (ShardPlan* shard = shard_of(blocks)) add_fused(*shard, checkpoint_, blocks, *scales);
  }
}

// Experts of a whole layer in one tensor that is plain already.
void DequantPlanner::add_adapted_fused() {
  if (!options_.adapter) return;
  for (const Tensor& tensor : checkpoint_.tensors()) {
    if (!is_fused_floats(tensor) || !has_factors(tensor)) continue;
    if (!is_in_order(checkpoint_, tensor)) refuse_factors(tensor);
    replaced_.insert(&tensor);
    if (ShardPlan* shard = shard_of(tensor)) add_fused_floats(*shard, checkpoint_, tensor, *options_.adapter);
  }
}

bool DequantPlanner::has_factors(const Tensor& tensor) const {
  return options_.adapter && std::ranges::count(options_.adapter->expert_layers(), layer_of(tensor.name)) > 0;
}

void DequantPlanner::refuse_factors(const Tensor& tensor) const {
  if (has_factors(tensor))
    fail_as(
        ErrorKind::kUnsupported,
        "{}: {} {}: LoRA is not added to experts that are stored transposed, or with gate and up in turns",
        checkpoint_.path(), tensor.name, describe(tensor));
}

void DequantPlanner::add_rest() {
  for (const Tensor& tensor : checkpoint_.tensors()) {
    ShardPlan* shard = shard_of(tensor);
    if (!shard || replaced_.contains(&tensor)) continue;
    if (tensor.dtype == Dtype::kE4m3 || tensor.dtype == Dtype::kE5m2 || tensor.dtype == Dtype::kF4)
      fail_as(ErrorKind::kUnsupported, "{}: {} outside a 2-D weight with scales cannot be dequantised",
              tensor.name, describe(tensor));
    add_copy(*shard, tensor);
  }
}

ConversionPlan DequantPlanner::plan() {
  add_linears();
  add_fused_experts();
  add_adapted_fused();
  if (options_.adapter && std::ranges::any_of(checkpoint_.tensors(), is_kt_array))
    fail("{}: its experts are converted for the CPU already: an adapter is added to the original",
         checkpoint_.path());
  if (options_.adapter) options_.adapter->check_all_taken();
  if (replaced_.empty()) {
    if (std::ranges::any_of(checkpoint_.tensors(), is_kt_array))
      fail("{}: its experts are converted for the CPU already, which is not undone: dequantise the original",
           checkpoint_.path());
    fail("{}: nothing in it is quantised", checkpoint_.path());
  }
  add_rest();

  ConversionPlan plan = begin_plan(checkpoint_, options_);
  for (ShardPlan& shard : shards_)
    if (!shard.tensors.empty()) plan.shards.push_back(std::move(shard));
  // An index of some files would hide the others from a reader.
  plan.index = options_.files.empty();
  for (SideFile& file : side_files(checkpoint_.folder())) plan.side_files.push_back(std::move(file));
  return plan;
}

// --- GGUF ---

std::shared_ptr<const ExpertSource> experts_in(const Checkpoint& checkpoint) {
  if (checkpoint.config().experts == 0) return nullptr;
  return open_experts(checkpoint);
}

void add_gguf_expert(ShardPlan& shard, const Checkpoint& checkpoint, const LoraFile* adapter,
                     const std::shared_ptr<const ExpertSource>& source, int layer, int expert) {
  for (const Projection projection : kProjections) {
    const std::string module = source->module_name(layer, expert, projection);
    const auto open = [source, layer, expert, projection] { return source->at(layer, expert, projection); };
    const auto matrix = open();
    add_with(shard, module + ".weight", kept_type(*matrix), *matrix,
             static_cast<uint64_t>(matrix->n * matrix->k), open,
             factors_of(adapter, checkpoint, module, *matrix));
    const auto bias = source->bias(layer, expert, projection);
    if (!bias) continue;
    const size_t index = shard.tensors.size();
    shard.tensors.push_back({module + ".bias", Dtype::kF32, {matrix->n}});
    shard.pieces.push_back(
        {.source_bytes = bias->size() * 4,
         .scratch_bytes = bias->size() * 4,
         .run = [source, layer, expert, projection, index](ShardOutput& out, Scratch&, PieceReport&) {
           const std::vector<float> values = source->bias(layer, expert, projection).value();
           out.write(index, 0, std::as_bytes(std::span(values)));
         }});
  }
}

ConversionPlan plan_gguf(const Checkpoint& checkpoint, const DequantPlanOptions& options) {
  if (!options.files.empty())
    fail("{}: a GGUF checkpoint is dequantised as a whole, not {}", checkpoint.path(), options.files.front());
  check_published_names(checkpoint);
  const std::shared_ptr<const ExpertSource> source = experts_in(checkpoint);
  const auto is_expert = [&](std::string_view tensor) { return source && source->owns(tensor); };
  std::vector<ShardPlan> shards;
  if (source)
    for (const int layer : source->layers()) {
      ShardPlan& shard = shards.emplace_back();
      shard.layer = layer;
      for (int expert = 0; expert < source->experts(); ++expert)
        add_gguf_expert(shard, checkpoint, options.adapter, source, layer, expert);
    }
  ShardPlan rest;
  rest.layer = -1;
  std::set<const Tensor*> replaced;
  for (const LinearModule& linear : find_linears(checkpoint, is_expert)) {
    if (is_extra_layer(checkpoint, linear.module)) continue;
    const auto open = [&checkpoint, linear] { return open_linear(checkpoint, linear); };
    const auto matrix = open();
    add_with(rest, linear.module + ".weight", kept_type(*matrix), *matrix, linear.bytes(), open,
             factors_of(options.adapter, checkpoint, linear.module, *matrix));
    replaced.insert(linear.tensors.begin(), linear.tensors.end());
  }
  add_gguf_rest(rest, checkpoint,
                [&](const Tensor& tensor) { return replaced.contains(&tensor) || is_expert(tensor.name); });
  shards.push_back(std::move(rest));
  if (options.adapter) options.adapter->check_all_taken();

  ConversionPlan plan = begin_plan(checkpoint, options);
  for (ShardPlan& shard : shards) {
    shard.file = shard_name(plan.shards.size() + 1, shards.size());
    shard.metadata = {{"format", "pt"}, {"kt.version", options.version}};
    plan.shards.push_back(std::move(shard));
  }
  return plan;
}

}  // namespace

ConversionPlan plan_dequant(const Checkpoint& checkpoint, const DequantPlanOptions& options) {
  if (checkpoint.is_gguf()) return plan_gguf(checkpoint, options);
  return DequantPlanner(checkpoint, options).plan();
}

}  // namespace kt::inline weights
