// Plans that write kt weights: from the experts of any checkpoint, or from a `.kt` folder that is to become
// merged files. conversion.h runs them.
#pragma once
#include <string>

#include "weights/checkpoint.h"
#include "weights/experts.h"
#include "weights/kt/kt_layout.h"
#include "weights/plans/conversion.h"

namespace kt::inline weights {

struct KtPlanOptions {
  std::string output;
  int bits = 4;           // 4 or 8
  int parts = 1;          // divides the intermediate size
  bool merge = true;      // safetensors; else a folder of .kt files
  bool backward = false;  // transposed copies for training as well
  bool report = false;    // errors of expert outputs on random inputs
  Rounding rounding = Rounding::kEstablished;
  std::string tool;  // "kt 0.1.0", for the metadata
};

// One MoE layer a shard in layer order, one piece an expert. Merged output has the other tensors in its last
// shard, renamed; tensors of a GGUF file are left out, because safetensors has no name for their types.
// Experts without other tensors have kt_weights.json beside them, which names the checkpoint (kt_origin.h). The
// checkpoint and the source must outlive the plan. Errors: parts that do not divide, experts with biases
// (kt weights have no place for them), two tensors that would get one name.
ConversionPlan plan_kt_weights(const Checkpoint& checkpoint, const ExpertSource& source,
                               const KtPlanOptions& options);

struct KtMergeOptions {
  std::string folder;    // of `_layer_*`
  std::string original;  // the model it was made from: other tensors and side files; may be empty
  std::string output;
  int max_tensors = 0;         // of a shard; 0: one layer a shard, as direct conversion writes
  std::string tool;            // for folders that do not say who made them
  GgufFamilies families = {};  // for an original of GGUF files
};

// The files that merged conversion of the same model would have written, byte for byte (where the folder says
// how it was made: kt_arrays.h). With max_tensors, the same tensors in the same order in shards of that many.
ConversionPlan plan_merge(const KtMergeOptions& options);

}  // namespace kt::inline weights
