// How often routers chose each expert. One thread counts, any thread may read at the same time.
#pragma once
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "nn/ops.h"

namespace kt::inline models {

class ExpertCounts final : public RouteWatch {
 public:
  // `layers`: those that route, by their number in the model.
  ExpertCounts(std::vector<int> layers, int experts, int top_k)
      : layers_(std::move(layers)),
        experts_(experts),
        top_k_(top_k),
        counts_(layers_.size() * static_cast<size_t>(experts)) {}

  const std::vector<int>& layers() const { return layers_; }
  int experts() const { return experts_; }
  int top_k() const { return top_k_; }

  // `at` counts within layers(). Negative ids are skipped.
  void chose(size_t at, std::span<const int32_t> ids) override {
    for (int32_t id : ids)
      if (id >= 0) increment(counts_[at * static_cast<size_t>(experts_) + static_cast<size_t>(id)]);
  }
  void took(std::chrono::nanoseconds time) override { nanoseconds_ += static_cast<uint64_t>(time.count()); }

  void on_device(uint64_t pairs, std::chrono::nanoseconds waited) override {
    device_pairs_ += pairs;
    waited_ += static_cast<uint64_t>(waited.count());
  }

  std::vector<uint64_t> snapshot() const {  // [layers, experts]
    std::vector<uint64_t> out(counts_.size());
    for (size_t i = 0; i < out.size(); ++i) out[i] = counts_[i].load(std::memory_order_relaxed);
    return out;
  }
  double seconds() const { return static_cast<double>(nanoseconds_.load(std::memory_order_relaxed)) * 1e-9; }
  // What a device ran of them, and how long it waited for the others.
  uint64_t device_pairs() const { return device_pairs_.load(std::memory_order_relaxed); }
  double waited_seconds() const {
    return static_cast<double>(waited_.load(std::memory_order_relaxed)) * 1e-9;
  }

 private:
  // A read and a write instead of a locked instruction: only one thread counts.
  static void increment(std::atomic<uint64_t>& count) {
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  std::vector<int> layers_;
  int experts_, top_k_;
  std::vector<std::atomic<uint64_t>> counts_;
  std::atomic<uint64_t> nanoseconds_ = 0, device_pairs_ = 0, waited_ = 0;
};

}  // namespace kt::inline models
