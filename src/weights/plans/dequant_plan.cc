#include "weights/plans/dequant_plan.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/checked.h"
#include "base/error.h"
#include "weights/dialects/dialects.h"
#include "weights/experts.h"
#include "weights/kt/kt_names.h"
#include "weights/linears.h"
#include "weights/plans/plan_parts.h"
#include "weights/plans/source_identity.h"

namespace kt {
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
  void add_rest();

  const Checkpoint& checkpoint_;
  const DequantPlanOptions& options_;
  std::vector<bool> chosen_;
  std::vector<ShardPlan> shards_;     // [files]
  std::set<const Tensor*> replaced_;  // not to be copied
};

void DequantPlanner::add_linears() {
  for (const LinearModule& linear : find_linears(checkpoint_, [](std::string_view) { return false; })) {
    if (!linear.quantised) continue;
    replaced_.insert(linear.tensors.begin(), linear.tensors.end());
    ShardPlan* shard = shard_of(*linear.main);
    if (!shard) continue;
    const auto open = [&checkpoint = checkpoint_, linear] { return open_linear(checkpoint, linear); };
    add_floats(*shard, linear.module + ".weight", Dtype::kBf16, *open(), linear.bytes(), open);
  }
}

void DequantPlanner::add_fused_experts() {
  for (const Tensor& blocks : checkpoint_.tensors()) {
    if (!blocks.name.ends_with("_blocks")) continue;
    const std::string stem = blocks.name.substr(0, blocks.name.size() - std::string_view("blocks").size());
    const Tensor* scales = checkpoint_.find(stem + "scales");
    if (!scales) continue;
    replaced_.insert({&blocks, scales});
    if (ShardPlan* shard = shard_of(blocks)) add_fused(*shard, checkpoint_, blocks, *scales);
  }
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

void add_gguf_expert(ShardPlan& shard, const std::shared_ptr<const ExpertSource>& source, int layer,
                     int expert) {
  for (const Projection projection : kProjections) {
    const std::string module = source->module_name(layer, expert, projection);
    const auto open = [source, layer, expert, projection] { return source->at(layer, expert, projection); };
    const auto matrix = open();
    add_floats(shard, module + ".weight", kept_type(*matrix), *matrix,
               static_cast<uint64_t>(matrix->n * matrix->k), open);
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
        add_gguf_expert(shard, source, layer, expert);
    }
  ShardPlan rest;
  rest.layer = -1;
  std::set<const Tensor*> replaced;
  for (const LinearModule& linear : find_linears(checkpoint, is_expert)) {
    if (is_extra_layer(checkpoint, linear.module)) continue;
    const auto open = [&checkpoint, linear] { return open_linear(checkpoint, linear); };
    const auto matrix = open();
    add_floats(rest, linear.module + ".weight", kept_type(*matrix), *matrix, linear.bytes(), open);
    replaced.insert(linear.tensors.begin(), linear.tensors.end());
  }
  add_gguf_rest(rest, checkpoint,
                [&](const Tensor& tensor) { return replaced.contains(&tensor) || is_expert(tensor.name); });
  shards.push_back(std::move(rest));

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

}  // namespace kt
