// Training through one layer of experts whose weights are frozen: a forward that keeps what its backward needs, and the
// backward over the same packed bytes. Low-rank factors (LoRA) are the caller's, as are their gradients.
//
//   t   = X A1^T
//   g|u = X [Wg;Wu]^T + s1 t B1^T (+ biases)
//   h   = f(g, u)
//   td  = h A2^T
//   y   = h Wd^T + s2 td B2^T (+ bias)
//   out[token] += w y
//
// Backward from dO, for the rows of an expert:
//   dhu  = dO Wd + s2 (dO B2) A2
//   dw   = <dhu, h> + <dO, bias of down>
//   dh   = w dhu, and from f' dg and du
//   dA2 += s2 (w dO B2)^T h
//   dB2 += s2 (w dO)^T td
//   dT   = s1 [dg|du] B1
//   dX   = [dg|du] [Wg;Wu] + dT A1
//   dA1 += dT^T X
//   dB1 += s1 [dg|du]^T t
//
// Gradients of factors are added to what is there; those of the input and of routing weights are overwritten.
#pragma once
#include <memory>

#include "nn/experts.h"
#include "nn/lora_adapter.h"

namespace kt::inline nn {

// [as the factors], f32; null: not wanted.
struct ExpertLoraGrads {
  float *gate_up_a = nullptr, *gate_up_b = nullptr, *down_a = nullptr, *down_b = nullptr;
};

// What a forward keeps until its backward: which rows went where, and gate and up before the activation of each, in
// bf16 or (with Precision::kF32) f32. Empty: backward computes them again. Its memory goes back to the workspace of the
// forward, for the next one to keep; it may outlive both.
class SavedCall {
 public:
  SavedCall();
  ~SavedCall();
  SavedCall(SavedCall&&) noexcept;
  SavedCall& operator=(SavedCall&&) noexcept;
  bool empty() const;
  size_t bytes() const;
  struct State;

 private:
  friend class ExpertsGrad;
  std::unique_ptr<State> state_;
};

struct TrainForwardArgs {
  ForwardArgs call;  // its adapter must be null
  ExpertLora lora;
  SavedCall* keep = nullptr;  // replaced; null: nothing is kept
};

struct TrainBackwardArgs {
  ForwardArgs call;                   // as given to forward: input, ids, weights, skip; output is not used
  ExpertLora lora;                    // as given to forward
  const SavedCall* saved = nullptr;   // null or empty: gate and up are computed again
  const void* output_grad = nullptr;  // [tokens, hidden]
  Real output_grad_type = Real::kF32;
  int64_t output_grad_stride = 0;  // elements; 0: hidden
  float* input_grad = nullptr;     // [tokens, hidden] or null
  float* weights_grad = nullptr;   // [tokens, top_k] or null; pairs that are skipped get 0
  ExpertLoraGrads lora_grads;
};

// Over experts that stay where they are. Products are in f32 where the experts' options say so, else of bf16 operands
// whatever the weights are (where the CPU has no such product: f32); only a forward with Precision::kInt8 rounds
// activations to bytes, and its backward does not. Where operands are bf16 those of low-rank factors are too, for
// experts with as many rows as make that worth it (factor_products.h). So a forward gives the bits of Experts::forward
// with a LoraAdapter of the same arithmetic for options that name a precision. Results are bitwise the same for any
// number of threads at a fixed number of nodes. Calls are serialised with forwards of the same workspace.
class ExpertsGrad {
 public:
  explicit ExpertsGrad(const Experts& experts);
  void forward(const TrainForwardArgs& args) const;
  void backward(const TrainBackwardArgs& args) const;
  // For plans, of calls whose rows are spread evenly over the experts: what is kept of a forward, and what a backward
  // takes of the workspace.
  size_t kept_bytes(int tokens, int top_k) const;
  size_t backward_bytes(int tokens, int top_k, const ExpertLora& lora) const;

 private:
  Precision precision() const;
  Real kept_type() const;
  void keep(SavedCall& saved, const ForwardArgs& call) const;

  const Experts& experts_;
};

}  // namespace kt::inline nn
