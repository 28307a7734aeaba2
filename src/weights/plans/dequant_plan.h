// A quantised checkpoint turned back into bf16: every matrix that has scales becomes a plain .weight, and
// config.json loses its quantization_config. The reverse of nothing: what rounding lost stays lost.
#pragma once
#include <string>
#include <vector>

#include "weights/checkpoint.h"
#include "weights/plans/conversion.h"

namespace kt::inline weights {

class LoraFile;

struct DequantPlanOptions {
  std::string output = {};
  std::vector<std::string> files = {};  // only these files of the source, by file name; empty: all
  std::string config_path = {};         // config.json to write instead of the checkpoint's own; "": its own
  std::string version = {};
  // A folder's, whose factors are added to every matrix that they belong to: W + scale * B A in f32, rounded once. Then
  // a checkpoint without anything quantised will do, and experts in one tensor for a whole layer
  // ("...experts.gate_up_proj" [E, 2I, H]) keep that form. Must outlive the plan.
  const LoraFile* adapter = nullptr;
};

// Output files have the source's names, each with what its source holds: fp8 (blocks, channels), int8,
// compressed-tensors, GPTQ, AWQ, MXFP4 and MXFP8 weights as bf16 under "<module>.weight", everything else
// copied; scales, zero points and shapes go. Fused MXFP4 experts ("..._blocks" [E, 2I, H/32, 16]) become
// [E, H, 2I], as their models want it in bf16. The checkpoint must outlive the plan.
//
// A GGUF source is written as by plan_compressed (compressed_plan.h): published names and row order, a file for each
// layer with experts and one for the rest, config.json from its metadata; tokenizer files are for the caller to add.
//
// Errors: nothing quantised and no adapter, an adapter with factors that fit no matrix or the experts of a tensor
// stored transposed or in turns of gate and up, a file that is not part of the checkpoint, some files of a GGUF, fused
// experts in other quantised types.
ConversionPlan plan_dequant(const Checkpoint& checkpoint, const DequantPlanOptions& options);

}  // namespace kt::inline weights
