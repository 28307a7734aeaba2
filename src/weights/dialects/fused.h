// How a fused expert tensor is laid out: which of [E, 2I, H] and [E, H, 2I] it is, and whether gate and up
// are halves or take turns.
#pragma once
#include <span>

#include "weights/config.h"
#include "weights/dialects/dialects.h"

namespace kt::inline weights {

struct FusedStyle {
  bool transposed = false;   // [E, H, 2I] and [E, I, H]
  bool interleaved = false;  // gate in even rows, up in odd ones; else gate is the first half
};

// By the shapes of gate_up (or of gate alone) and down and the config's sizes; where these allow both ways by
// model_type; else an Error: never a guess.
FusedStyle fused_style(std::span<const ExpertTensor> gate_up, std::span<const ExpertTensor> down,
                       const ModelConfig& config);

// Whether published experts of this model have gate in even rows and up in odd ones.
bool has_gate_and_up_in_turns(const ModelConfig& config);

}  // namespace kt::inline weights
