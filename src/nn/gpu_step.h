// What a step needs on the GPU besides rows: its number, where its tokens stand, pages of their sequences, angles of
// each kind of rotation. Filled on the host, sent in one copy. Used by gpu_ops.cc.
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

namespace kt::inline nn {

class GpuStep {
 public:
  int rotation(const RopeSpec& spec);  // as Ops::make_rotation
  int64_t width() const;               // floats a token takes
  void allocate(std::shared_ptr<const Gpu> gpu, int max_tokens);
  int max_tokens() const { return max_tokens_; }

  // The stream has done all that read the step before. Tables have `rows` rows, of which those behind `tokens` are
  // nobody's. Addresses are the same for as many rows, as long as version() is.
  void fill(std::span<const AttentionSequence> sequences, int tokens, int rows, uint32_t number);
  void send(GpuStream& stream);
  int version() const { return version_; }

  const StepWords* words() const { return device_.as<const StepWords>(); }
  TokenPlaces places() const;
  const Rope& rope(int rotation) const { return ropes_[static_cast<size_t>(rotation)]; }
  const float* cosines(int rotation) const;  // [rows, half]
  const float* sines(int rotation) const;
  // Factors of the step's queries, [rows]. Of a kind that was not asked for before, they are to be sent again.
  const float* growth(const QueryGrowth& of);
  bool sent() const { return sent_; }

 private:
  void reserve(size_t pages);
  void fill_growth(size_t kind);
  int64_t angles_at(int rotation) const;  // floats, of cosines; sines follow

  static constexpr int64_t kHead = 4;  // floats before the tables: StepWords
  static constexpr size_t kMostGrowths = 2;

  std::shared_ptr<const Gpu> gpu_;
  std::vector<Rope> ropes_;
  std::vector<QueryGrowth> growths_;
  int max_tokens_ = 0, rows_ = 0, version_ = 0;
  bool sent_ = false;
  size_t pages_ = 0;     // that there is room for
  size_t used_ = 0;      // bytes of the step
  PinnedBuffer host_;    // words, positions, first pages, factors, angles, then pages
  DeviceBuffer device_;  // the same
};

}  // namespace kt::inline nn
