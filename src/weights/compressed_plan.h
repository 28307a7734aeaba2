// A checkpoint turned into compressed-tensors "pack-quantized" weights (W4A16, W8A16), round to nearest
// or as the caller rounded: what vLLM, SGLang and transformers load, and what the CPU runs as groupwise int4.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "weights/checkpoint.h"
#include "weights/compressed.h"
#include "weights/conversion.h"
#include "weights/experts.h"
#include "weights/requantise.h"

namespace kt {

struct CompressedPlanOptions {
  std::string output = {};
  int bits = 4;              // 4 or 8
  int group_size = 128;      // columns of one scale; -1: one for each row
  bool all_linears = false;  // also attention, dense and shared experts; else routed experts only
  // Modules to leave as they are, besides those never quantised (ignore_list.h): "re:REGEX" matched from the
  // start of the module's name, or a name or part of one.
  std::vector<std::string> ignore = {};
  std::string version = {};
  // How an expert's matrix was rounded, where that was decided elsewhere (calibration), in packed_format;
  // asked on worker threads while pieces run, after ConversionPlan::prepare. Null: round to nearest here.
  std::function<Matrix(int layer, int expert, Projection projection)> rounded = {};
  Json method = {};  // goes into the settings: what `rounded` depends on
};

// How experts are written: type T of the scales is the source's own, bf16 where that was quantised already.
PackedSpec expert_spec(const Checkpoint& checkpoint, const ExpertSource& source,
                       const CompressedPlanOptions& options, int layer);
// Whether the options leave that expert's matrix as it is.
bool expert_ignored(const ExpertSource& source, const CompressedPlanOptions& options, int layer, int expert,
                    Projection projection);

// What plan_compressed does to every matrix where it rounds to nearest, for doing it while a model is read
// instead. The checkpoint must outlive it.
ModelRounding packed_rounding(const Checkpoint& checkpoint, const CompressedPlanOptions& options);

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

}  // namespace kt
