#include "bench/limit_windows.h"

#include <algorithm>

#include "base/cpu.h"
#include "base/error.h"

namespace kt::inline bench {
namespace {

constexpr double kReadWindow = 3e-3, kMultiplyWindow = 1e-3;  // seconds

size_t buffer_bytes() {
  return std::min(std::max<size_t>(size_t{512} << 20, 4 * cpu().l3), read_buffer_bytes());
}

Product float_product(const Kernels& kernels) {
  return has_product(kernels, Product::kBf16) ? Product::kBf16 : Product::kF32;
}

}  // namespace

LimitWindows::LimitWindows(const std::shared_ptr<Pool>& pool, const Kernels& kernels)
    : reader_(pool, kernels, buffer_bytes()) {
  multipliers_.emplace_back(pool, kernels, Product::kS8);
  multipliers_.emplace_back(pool, kernels, float_product(kernels));
  // Of about kReadWindow, judged by the second time through.
  const size_t probe = std::min<size_t>(reader_.size(), size_t{64} << 20);
  reader_.window(probe);
  const double rate = static_cast<double>(probe) / reader_.window(probe);
  window_bytes_ =
      std::clamp<size_t>(static_cast<size_t>(rate * kReadWindow), size_t{1} << 20, reader_.size());
}

void LimitWindows::look() {
  if (now_seconds() - looked_at_ >= kLookAfter) look_now();
}

void LimitWindows::look_now() {
  reads_.push_back(static_cast<double>(window_bytes_) / reader_.window(window_bytes_));
  integers_.push_back(multipliers_[0].window(kMultiplyWindow));
  floats_.push_back(multipliers_[1].window(kMultiplyWindow));
  looked_at_ = now_seconds();
}

Rates LimitWindows::take() {
  KT_CHECK(!reads_.empty(), "no look at the limits");
  const Rates out{.read_bytes = median(reads_),
                  .integer_operations = median(integers_),
                  .float_operations = median(floats_)};
  for (std::vector<double>* looks : {&reads_, &integers_, &floats_}) looks->clear();
  return out;
}

}  // namespace kt::inline bench
