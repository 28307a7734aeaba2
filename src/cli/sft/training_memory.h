// What a training run takes of this machine, from the model's description and the recipe: before any weight is read.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "models/module_tree.h"

namespace kt::inline cli {

// What decides it.
struct TrainingLoad {
  int64_t rows = 1,
          row_tokens = 0;  // of a micro-batch: sequences that run at once, and the most tokens of one
  int64_t rank = 8;
  bool experts_trained = true;
  bool retain = true;                                     // experts keep gate and up for backward
  bool checkpointing = true;                              // of the layers' activations in torch
  int torch_bytes = 4;                                    // of a number in torch: 2 with bf16
  int expert_bytes = 4;                                   // of a number that experts keep: 2 with bf16
  uint64_t packed_experts = 0, trainable = 0, whole = 0;  // whole: parameters that additional_target trains
  bool gpu = false;                                       // holds all that is in torch

  int64_t tokens() const { return rows * row_tokens; }
};

// Bytes, by what they are for.
struct TrainingMemory {
  uint64_t experts = 0;  // packed weights
  uint64_t dense = 0;    // all other weights, in torch
  uint64_t lora = 0;     // values, gradients and both moments of AdamW, f32
  uint64_t records = 0;  // what the experts' backward needs
  uint64_t layers = 0;   // activations in torch
  uint64_t logits = 0;   // of a micro-batch, with their gradient
  uint64_t process = 0;  // Python and its libraries
  uint64_t available = 0, gpu_available = 0;
  bool gpu = false;

  uint64_t host() const { return experts + records + process + lora + (gpu ? 0 : torch()); }
  uint64_t device() const { return gpu ? torch() : 0; }
  uint64_t torch() const { return dense + layers + logits; }
  bool fits() const { return host() <= available && device() <= gpu_available; }
  // Name and bytes of each part, none of them zero.
  std::vector<std::pair<std::string, uint64_t>> parts() const;
  std::string largest(int most = 3) const;  // "routed experts 1.2 GiB, LoRA 300 MiB"
};

TrainingMemory training_memory(const ModelSpec& spec, const ModuleTree& tree, const TrainingLoad& load);

// Parameters of all but the routed experts.
uint64_t dense_parameters(const ModelSpec& spec, const ModuleTree& tree);
uint64_t expert_parameters(const ModelSpec& spec);

}  // namespace kt::inline cli
