// The operations of nn/ops.h on one stream of one GPU; routed experts without a copy there run on the workers of a
// pool. Weights are the CPU's packed bytes in device memory. Sums are f32; products of many rows round their operands
// to bf16 where precision allows.
#pragma once
#include <memory>

#include "base/pool.h"
#include "cuda/device.h"
#include "nn/ops.h"

namespace kt::inline nn {

struct GpuOpsOptions {
  int number = 0;                       // of the GPU, also where there is none to plan for
  bool sizes_only = false;              // as CpuOpsOptions'; needs no GPU
  std::shared_ptr<const Gpu> gpu = {};  // null with sizes_only
  // Steps that are alike are noted down as a graph and replayed. Not on a GPU that shows a screen: kernels of a graph
  // wait for the host, and such a GPU kills those that take long.
  bool graphs = true;
  // Routed experts without a copy pass through the GPU for steps of at least so many tokens, prompts; 0: they stay with
  // the pool; kMeasured: from where on that is faster. So much memory for slots that they pass through, and as much
  // again for rows of their products.
  static constexpr int kMeasured = -1;
  int stream_from = 0;
  size_t stream_bytes = 0;
};

// Of a layer's experts: smaller ones are in the CPU's caches, and pass through the GPU only if somebody says from
// where.
inline constexpr size_t kLeastPassed = size_t{16} << 20;

std::unique_ptr<Ops> make_gpu_ops(std::shared_ptr<Pool> pool, GpuOpsOptions options);

}  // namespace kt::inline nn
