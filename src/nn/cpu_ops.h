// The operations of nn/ops.h on the workers of a pool, over weights in host memory.
#pragma once
#include <memory>

#include "base/pool.h"
#include "nn/ops.h"

namespace kt::inline nn {

struct CpuOpsOptions {
  bool sizes_only = false;  // weights are laid out but not read, and nothing runs but measure()
};

// Results are bitwise the same for any number of threads.
std::unique_ptr<Ops> make_cpu_ops(std::shared_ptr<Pool> pool, CpuOpsOptions options = {});

}  // namespace kt::inline nn
