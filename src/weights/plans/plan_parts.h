// What planners of whole checkpoints share: copying tensors, writing a stored matrix as floats, side files,
// and what a plan's settings say about its source.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/function_ref.h"
#include "weights/checkpoint.h"
#include "weights/experts.h"
#include "weights/plans/conversion.h"

namespace kt::inline weights {

// "model-00003-of-00017.safetensors"; number counts from 1.
std::string shard_name(size_t number, size_t total);

// Adds the tensor as it is and the pieces that copy its bytes from the mapping. The checkpoint must outlive
// the plan. GGUF tensors have no safetensors type: Error.
void add_copy(ShardPlan& shard, const Tensor& tensor);

// Opens a matrix when it is needed; plans hold thousands of these, the matrices themselves only while a piece
// runs.
using MatrixOpener = std::function<std::unique_ptr<StoredMatrix>()>;

// Adds `name` [n, k] in `type` (kBf16, kF16, kF32) and a piece that writes the matrix's values, each rounded
// once, half to even.
void add_floats(ShardPlan& shard, std::string name, Dtype type, const StoredMatrix& shape,
                uint64_t source_bytes, MatrixOpener open);
// The piece's inner loop: rows of `matrix` as `type` into tensor number `tensor` of the shard.
void write_floats(const StoredMatrix& matrix, Dtype type, size_t tensor, ShardOutput& out, Scratch& scratch);
// The same, from `offset` bytes of the tensor on.
void write_floats_at(const StoredMatrix& matrix, Dtype type, size_t tensor, uint64_t offset, ShardOutput& out,
                     Scratch& scratch);
// f32 to `type`, appended to nothing: out has count * size bytes.
void narrow(std::span<const float> values, Dtype type, std::byte* out);

// What keeps its values: plain floats in their own type, anything else as bf16.
Dtype kept_type(const StoredMatrix& matrix);

// GGUF files are written under the names their models were published with. Error where those are not known, or where
// numbers are other ones.
void check_published_names(const Checkpoint& checkpoint);
// Of a GGUF layer that predicts further tokens: parts of it have no published names.
bool is_extra_layer(const Checkpoint& checkpoint, std::string_view published);
// Norms and biases: all that `taken` leaves, in f32 as these files have them. A log line names tensors that have no
// published name.
void add_gguf_rest(ShardPlan& shard, const Checkpoint& checkpoint, FunctionRef<bool(const Tensor&)> taken);

// Rows of k columns read at a time: about 4 MiB of f32, at least 1.
int64_t rows_at_once(int64_t k);

// Regular files beside the weights that belong to a model but hold no weights: tokenizer, generation config,
// chat template, licences. Not config.json, weights, indices, manifests or hidden files.
std::vector<SideFile> side_files(const std::string& folder);

// The source's files with their sizes, for ConversionPlan::settings.
Json source_settings(const Checkpoint& checkpoint);

// config.json without any quantisation, at the top and in nested text configs.
Json config_without_quantization(const Json& config);

}  // namespace kt::inline weights
