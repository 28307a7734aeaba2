#include "bench/gpu_check.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <vector>

#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/kernels/args.h"

namespace kt::inline bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kTrialCopy = size_t{32} << 20;
constexpr int kTrialWidth = 256;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The norm of a row of ones is a row of ones, as far as 1 / sqrt(x) is right.
double difference_of_norm(const std::shared_ptr<const Gpu>& gpu, GpuStream& stream) {
  constexpr size_t kBytes = kTrialWidth * sizeof(float);
  const DeviceBuffer rows(gpu, 3 * kBytes, "rows of a trial");
  std::vector<float> ones(kTrialWidth, 1), out(kTrialWidth);
  float* const x = rows.as<float>();
  stream.copy(x, ones.data(), kBytes);
  stream.copy(x + kTrialWidth, ones.data(), kBytes);
  stream.launch("kt_norm", 1, 1, kTrialWidth / 4,
                NormArgs{.x = x,
                         .weight = x + kTrialWidth,
                         .out = x + 2 * kTrialWidth,
                         .x_stride = kTrialWidth,
                         .out_stride = kTrialWidth,
                         .width = kTrialWidth});
  stream.copy(out.data(), x + 2 * kTrialWidth, kBytes);
  stream.wait();
  double most = 0;
  for (const float value : out)
    most = std::isfinite(value) ? std::max(most, std::abs(value - 1.0)) : HUGE_VAL;
  return most;
}

}  // namespace

GpuCheck check_gpu(int number) {
  const auto gpu = std::make_shared<const Gpu>(number);
  GpuCheck out{.free = gpu->free_memory(), .bound = 1e-6};
  GpuStream stream(gpu);
  const DeviceBuffer device(gpu, kTrialCopy, "a copy of a trial");
  const PinnedBuffer host = pinned_for(*gpu, kTrialCopy);
  for (int i = 0; i < 3; ++i) {  // the first one also makes what copies need
    const auto start = Clock::now();
    stream.copy(device.at(), host.data(), kTrialCopy);
    stream.wait();
    out.to_gpu = std::max(out.to_gpu, static_cast<double>(kTrialCopy) / seconds_since(start));
  }
  const auto start = Clock::now();
  gpu->kernel("kt_norm");
  out.seconds_compile = seconds_since(start);
  out.difference = difference_of_norm(gpu, stream);
  return out;
}

}  // namespace kt::inline bench
