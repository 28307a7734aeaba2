// Training calls of one layer: a forward that may keep what its backward needs, and the backward. At once, on the
// calling thread and the team's workers.
#include "base/error.h"
#include "hybrid/expert_layer.h"
#include "hybrid/expert_layer_state.h"

namespace kt::inline hybrid {

ForwardArgs ExpertLayer::State::train_args(const LayerCall& call, std::vector<uint8_t>& mask_bytes) {
  team->check_process();
  check_call(call);
  ForwardArgs args = forward_args(call, nullptr, call.input_type);
  if (call.tokens == 0) return args;
  args.skip = read_mask(mask_bytes);
  check_weights(call, args.skip);
  return args;
}

void ExpertLayer::train_forward(const LayerCall& call, void* output, const ExpertLora& lora,
                                SavedCall* keep) {
  State& s = *state_;
  std::vector<uint8_t> mask_bytes;
  ForwardArgs args = s.train_args(call, mask_bytes);
  args.output = output;
  if (!output && call.tokens > 0) fail("layer {}: a null address for the output", s.options.layer);
  const std::shared_lock lock(s.in_use);
  ExpertsGrad(*s.experts).forward({.call = args, .lora = lora, .keep = keep});
}

void ExpertLayer::train_backward(const LayerCall& call, const ExpertLora& lora, const LayerBackward& back) {
  State& s = *state_;
  std::vector<uint8_t> mask_bytes;
  const ForwardArgs args = s.train_args(call, mask_bytes);
  if (!back.output_grad && call.tokens > 0)
    fail("layer {}: a null address for the output's gradient", s.options.layer);
  const std::shared_lock lock(s.in_use);
  ExpertsGrad(*s.experts)
      .backward({.call = args,
                 .lora = lora,
                 .saved = back.saved,
                 .output_grad = back.output_grad,
                 .output_grad_type = back.output_grad_type,
                 .input_grad = back.input_grad,
                 .weights_grad = back.weights_grad,
                 .lora_grads = back.lora_grads});
}

}  // namespace kt::inline hybrid
