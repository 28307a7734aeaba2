// The routed experts of a checkpoint, whatever its dialect: which layers have them, and each projection as a
// matrix in a Format of formats/. The one place where naming styles, fused tensors and packings of other
// tools end.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/matrix.h"
#include "weights/checkpoint.h"

namespace kt::inline weights {

enum class Projection : uint8_t { kGate, kUp, kDown };
inline constexpr Projection kProjections[] = {Projection::kGate, Projection::kUp, Projection::kDown};
std::string_view name_of(Projection projection);  // "gate", "up", "down"

// One matrix [n, k] as stored. Reading is const and may run on several threads. Refuses NaN codes and scales
// (E4M3 0x7F, E8M0 255, infinities) with an Error naming tensor, row and column.
class StoredMatrix {
 public:
  virtual ~StoredMatrix() = default;
  std::string name;  // the source's own: "model.layers.3.mlp.experts.7.gate_proj", "...gate_up_proj[7]"
  Format format;
  int64_t n = 0, k = 0;

  // Rows [first, first + count) in plain order and their own format, nothing re-quantised. first is a
  // multiple of format.span.n, and count too unless the matrix ends there.
  virtual Matrix rows(int64_t first, int64_t count) const = 0;
  Matrix matrix() const { return rows(0, n); }

  // The same rows as f32 [count, k], any first and count. The default dequantises rows(); float formats have
  // a fast path.
  virtual void values(int64_t first, int64_t count, float* out) const;

  // Rows worth reading at once. More where the rows of a stored tensor are interleaved, so that whoever walks
  // a matrix in blocks does not fetch every cache line of it once for every few rows.
  virtual int64_t rows_at_once() const { return 16; }

  // Asks the disk for the whole matrix, without waiting. The first read does it too; opening does not, so
  // that sizes can be had from headers alone.
  virtual void read_ahead() const {}

  // Memory that it takes for itself from the first read on; files that are mapped do not count.
  virtual uint64_t held_bytes() const { return 0; }
};

// Order of gate and up in fused tensors, and which of [E, 2I, H] and [E, H, 2I] they are, are settled when
// the source is opened, by shapes, then model_type, else refused.
class ExpertSource {
 public:
  virtual ~ExpertSource() = default;
  virtual std::string_view dialect() const = 0;  // "bf16", "fp8", "gptq", "kt-int4", "gguf", ...
  virtual std::vector<int> layers() const = 0;   // ascending; those >= num_hidden_layers (MTP) are left out
  virtual int experts() const = 0;
  virtual int64_t hidden() const = 0;
  virtual int64_t inter() const = 0;
  virtual std::unique_ptr<StoredMatrix> at(int layer, int expert, Projection projection) const = 0;
  // [inter] or [hidden] values, or nothing where this model has no biases.
  virtual std::optional<std::vector<float>> bias(int layer, int expert, Projection projection) const;
  // Whether this tensor of the checkpoint is part of some expert (MTP layers' too): the others are copied by
  // converters.
  virtual bool owns(std::string_view tensor) const = 0;
  // The source's name of a projection, without ".weight": what compressed-tensors output calls it. For fused
  // sources the per-expert spelling "<prefix>.mlp.experts.<e>.gate_proj".
  virtual std::string module_name(int layer, int expert, Projection projection) const = 0;
};

// What the caller says the source is; kAuto believes the tensors.
enum class InputType : uint8_t { kAuto, kBf16, kFp16, kF32, kFp8, kInt4, kGguf };
InputType input_type_named(std::string_view name);  // "auto", "bf16", ...; Error listing them

// Errors: no experts at all (kUnsupported), an expert or projection missing in some layer, shapes that
// disagree with each other or with the config, a type other than the one asked for, desc_act or zero points
// this code does not read (by name), fused tensors whose orientation nothing tells. The checkpoint must
// outlive the source.
std::unique_ptr<ExpertSource> open_experts(const Checkpoint& checkpoint, InputType type = InputType::kAuto);

// Converted kt weights: a merged folder or file of safetensors, or a folder of `_layer_*` with .kt files.
// `config` may come from the original model when the folder has none. Any number of parts on disk; matrices
// come back whole: gate and up per row, down with one scale per row and part (span.k = inter / parts).
std::unique_ptr<ExpertSource> open_kt_weights(const std::string& path);
bool is_kt_weights(const std::string& path);

// Those that stand in a model's own files, to run it: as open_experts(), and converted ones too.
std::unique_ptr<ExpertSource> open_own_experts(const Checkpoint& checkpoint);

// The experts under a path, whatever is there: kt weights, or a checkpoint, which lives as long as the
// source.
std::shared_ptr<const ExpertSource> open_experts(const std::string& path, GgufFamilies families = {});

}  // namespace kt::inline weights
