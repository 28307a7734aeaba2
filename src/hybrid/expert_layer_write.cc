// Weights of a slot for GPU code.
#include "base/error.h"
#include "hybrid/expert_layer_state.h"

namespace kt {

void ExpertLayer::submit_write(int, std::span<const ExpertBuffers>) {
  fail_as(ErrorKind::kUnsupported, "layer {}: write-back is not supported yet", options().layer);
}
size_t ExpertLayer::w13_bytes(int) const { return 0; }
size_t ExpertLayer::w13_scale_bytes(int) const { return 0; }
size_t ExpertLayer::w2_bytes(int) const { return 0; }
size_t ExpertLayer::w2_scale_bytes(int) const { return 0; }

}  // namespace kt
