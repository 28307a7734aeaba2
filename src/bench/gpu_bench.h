// A GPU's limits, and how near to them the operations of the engine come there: copies rotate over more memory than its
// caches have, times are medians between waits.
#pragma once
#include <memory>
#include <vector>

#include "bench/limit_bench.h"
#include "cuda/device.h"
#include "nn/ops.h"

namespace kt::inline bench {

struct GpuLimits {
  double copied = 0;               // bytes a second of its own memory, read and written
  double to_gpu = 0, to_host = 0;  // page-locked memory over the link
  double operations = 0;           // bf16, a second
};

struct GpuFigure {
  double seconds = 0;
  double bytes = 0, operations = 0;  // of a call, as `kt bench` counts them
  double limit_seconds = 0;
  bool by_memory = true;  // the limit is that of memory
};

class GpuBench {
 public:
  // `bytes` of memory are copied to and fro. Error(kUnsupported) where there is no such GPU.
  GpuBench(int number, std::shared_ptr<Pool> pool, size_t bytes, const MeasureFor& time);

  const Gpu& gpu() const { return *gpu_; }
  const GpuLimits& limits() const { return limits_; }
  // y[tokens, n] = x[tokens, k] W^T.
  GpuFigure product(const Format& format, int n, int k, int tokens) const;
  // One token with `context` tokens before it and itself.
  GpuFigure attention(const KvShape& shape, int heads, int context) const;

 private:
  double seconds_of_copy(void* to, const void* from) const;
  double matrix_peak() const;
  GpuFigure against_limit(Ops& ops, const StepRows& step, size_t calls, FunctionRef<void(size_t)> call) const;
  size_t copies_of(double bytes) const;

  std::shared_ptr<Gpu> gpu_;
  std::shared_ptr<Pool> pool_;
  std::unique_ptr<GpuStream> stream_;
  size_t bytes_;
  MeasureFor time_;
  GpuLimits limits_;
};

}  // namespace kt::inline bench
