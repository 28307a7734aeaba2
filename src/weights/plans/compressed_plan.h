// A checkpoint turned into compressed-tensors "pack-quantized" weights (W4A16, W8A16), round to nearest
// or as the caller rounded: what vLLM, SGLang and transformers load, and what the CPU runs as groupwise int4.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "weights/checkpoint.h"
#include "weights/dialects/compressed.h"
#include "weights/experts.h"
#include "weights/plans/conversion.h"

namespace kt::inline weights {

struct CompressedPlanOptions {
  std::string output = {};
  int bits = 4;              // 4 or 8
  int group_size = 128;      // columns of one scale; -1: one for each row
  bool all_linears = false;  // also attention, dense and shared experts; else routed experts only
  // Modules to leave as they are, besides those never quantised (ignore_list.h): "re:REGEX" matched from the
  // start of the module's name, or a name or part of one.
  std::vector<std::string> ignore = {};
  std::string version = {};
  // How a matrix was rounded, where that was decided elsewhere (calibration), in packed_format; nothing, or
  // null: round to nearest here. Asked by the module's name on worker threads while pieces run, after
  // ConversionPlan::prepare.
  std::function<std::optional<Matrix>(const std::string& module)> rounded = {};
  Json method = {};  // goes into the settings: what `rounded` depends on
};

// Names are the source's own modules with weight_packed, weight_scale and weight_shape; fused experts are
// written one by one. Scales have the source's type; where that was quantised, bf16. What is not quantised is
// copied, but for weights the source itself had quantised: those become bf16, since a model has one
// quantisation, and a log line says so. One shard for each layer with something quantised, then one with
// everything else. Checkpoint and source must outlive the plan. `source` may be null with all_linears.
//
// A GGUF source is written under the names its model was published with, rows in that order, and with the
// config.json its metadata amounts to; tokenizer files are for the caller to add. A log line names tensors
// that such a checkpoint has no place for.
//
// Errors: a group size that does not divide some matrix's columns, naming it and sizes that do; nothing to
// quantise; GGUF files of architectures whose published names are not known.
ConversionPlan plan_compressed(const Checkpoint& checkpoint, const ExpertSource* source,
                               const CompressedPlanOptions& options);

}  // namespace kt::inline weights
