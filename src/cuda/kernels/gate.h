// Gated activations: the functions of kernels/table.h.
#pragma once
#include "cuda/gpu.h"
#include "cuda/kernels/args.h"

namespace kt::inline cuda {

KT_GPU float sigmoid_of(float x) { return 1.0f / (1.0f + gpu::exp(-x)); }

KT_GPU float gated(float gate, float up, const GateSpec& spec) {
  if (spec.kind == 0) {  // ActivationKind::kSwiGlu
    if (spec.limit > 0) {
      gate = gate < spec.limit ? gate : spec.limit;
      up = up < spec.limit ? up : spec.limit;
      up = up > -spec.limit ? up : -spec.limit;
    }
    if (spec.alpha > 0) return gate * sigmoid_of(gate * spec.alpha) * (up + 1.0f);
    return gate * sigmoid_of(gate) * up;
  }
  if (spec.kind == 1) {  // kGeluTanh: 0.5 (1 + tanh(z)) = sigmoid(2 z)
    const float z = gpu::fma(gate * gate * gate, 0.044715f, gate) * 1.5957691216f;
    return gate * sigmoid_of(z) * up;
  }
  return 0.5f * gate * (1.0f + gpu::erf(gate * 0.70710678f)) * up;
}

}  // namespace kt::inline cuda
