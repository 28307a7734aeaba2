// Pages of keys and values in the memory of a GPU, in the order its kernels read (CachePlane of cuda/kernels/args.h):
// as many bytes as on a CPU. Made and used by gpu_ops.cc.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "cuda/device.h"
#include "cuda/kernels/args.h"
#include "nn/kv_cache.h"

namespace kt::inline nn {

class GpuCache final : public SequenceCache {
 public:
  GpuCache(std::shared_ptr<const Gpu> gpu, const SequenceShape& shape, int pages, int slots)
      : SequenceCache(shape, pages, slots) {
    if (!shape.states.empty())
      fail_as(ErrorKind::kUnsupported, "layers with a state for each sequence do not run on a GPU yet");
    size_t at = 0;
    for (const KvShape& plane : shape.planes) {
      plane_at_.push_back(at);
      at = checked_add(at, checked_mul(static_cast<size_t>(pages), plane.page_bytes(), "KV cache"),
                       "KV cache");
    }
    memory_ = DeviceBuffer(std::move(gpu), at, "the cache of keys and values");
  }
  // Of all caches that were and will be, this one.
  uint64_t serial() const { return serial_; }
  size_t bytes() const override { return memory_.size(); }
  void clear_slot(int) override {}
  void copy_slot(int, int) override {}

  CachePlane plane(int number) const {
    const KvShape& of = shape(number);
    return {.memory = memory_.at(plane_at_[static_cast<size_t>(number)]),
            .page_bytes = static_cast<int64_t>(of.page_bytes()),
            .key_bytes = static_cast<int64_t>(of.block_bytes(of.d_pad())),
            .value_bytes = static_cast<int64_t>(of.block_bytes(of.dv_pad())),
            .heads = of.heads,
            .d = of.d,
            .dv = of.dv,
            .d_pad = of.d_pad(),
            .dv_pad = of.dv_pad(),
            .shared = of.shared ? 1 : 0,
            .type = static_cast<int>(of.type)};
  }

 private:
  static uint64_t next_serial() {
    static std::atomic<uint64_t> last = 0;
    return ++last;
  }
  const uint64_t serial_ = next_serial();
  std::vector<size_t> plane_at_;  // bytes
  DeviceBuffer memory_;
};

}  // namespace kt::inline nn
