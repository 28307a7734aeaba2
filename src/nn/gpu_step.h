// What a step needs on the GPU besides rows: where its tokens stand, pages of their sequences, angles of each kind of
// rotation. Filled on the host, sent in one copy. Used by gpu_ops.cc.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/kernels/args.h"
#include "nn/kv_cache.h"
#include "nn/rope.h"

namespace kt {

class GpuStep {
 public:
  int rotation(const RopeSpec& spec);  // as Ops::make_rotation
  int64_t width() const;               // floats a token takes
  void allocate(std::shared_ptr<const Gpu> gpu, int max_tokens);
  int max_tokens() const { return max_tokens_; }

  // The stream has done all that read the step before.
  void send(std::span<const AttentionSequence> sequences, int tokens, GpuStream& stream);

  TokenPlaces places() const;
  const Rope& rope(int rotation) const { return ropes_[static_cast<size_t>(rotation)]; }
  const float* cosines(int rotation) const;  // [tokens, half]
  const float* sines(int rotation) const;
  // Factors of the step's queries, [tokens]; null where all are 1.
  const float* growth(const QueryGrowth& of, GpuStream& stream);

 private:
  void reserve(size_t pages);

  std::shared_ptr<const Gpu> gpu_;
  std::vector<Rope> ropes_;
  std::vector<int64_t> angles_at_;  // floats, of cosines; sines follow
  std::vector<int32_t> positions_, first_pages_;
  int max_tokens_ = 0, tokens_ = 0;
  size_t pages_ = 0;     // that there is room for
  PinnedBuffer host_;    // positions, first pages, angles, factors, then pages
  DeviceBuffer device_;  // the same
};

}  // namespace kt
