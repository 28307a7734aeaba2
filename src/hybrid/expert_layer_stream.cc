// A layer's work in the order of a stream.
#include "base/error.h"
#include "hybrid/expert_layer_state.h"

namespace kt {

ExpertLayer::~ExpertLayer() = default;

void ExpertLayer::submit(const LayerCall&, CudaStream) {
  fail_as(ErrorKind::kUnsupported, "layer {}: work in a stream is not supported yet", options().layer);
}

void ExpertLayer::sync(void*, int, CudaStream) {
  fail_as(ErrorKind::kUnsupported, "layer {}: work in a stream is not supported yet", options().layer);
}

void release_buffers() {}

}  // namespace kt
