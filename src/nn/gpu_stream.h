// Routed experts on their way to a GPU: a layer's packed bytes, as they lie in the host's memory, go in batches through
// slots of device memory, on a stream of their own, so that the next ones arrive while some are computed. Nothing is
// unpacked on the host. Used by gpu_ops.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "base/pool.h"
#include "cuda/device.h"
#include "nn/experts.h"
#include "nn/gpu_experts.h"

namespace kt::inline nn {

// A layer's experts as they are sent: of each its slice of every node and its biases. The experts outlive it.
class SentExperts {
 public:
  // Page-locks them where they lie; without a GPU sizes only.
  SentExperts(const std::shared_ptr<const Gpu>& gpu, const Experts& from);

  // Of every expert so many bytes, one behind the other.
  struct Part {
    const std::byte* first = nullptr;
    size_t bytes = 0;
    bool locked = false;
  };
  int experts() const { return experts_; }
  std::span<const Part> parts() const { return parts_; }
  size_t expert_bytes() const;
  bool locked() const;                             // all of it
  const std::string& why() const { return why_; }  // not, in CUDA's words
  // How kernels find a batch whose parts begin there.
  GpuExperts::Copies copies(std::span<uint8_t* const> parts, const int32_t* slots, int count) const;

 private:
  struct Piece {
    size_t blocks = 0;
    int gate_bias = -1, up_bias = -1;  // parts; none
  };
  size_t add(const void* first, size_t bytes, bool locked);

  int experts_ = 0;
  std::vector<Part> parts_;
  std::vector<Piece> pieces_;
  int down_bias_ = -1;
  std::string why_;
  std::vector<LockedMemory> locks_;
  std::vector<PinnedBuffer> biases_;
};

class ExpertStream {
 public:
  ExpertStream(std::shared_ptr<const Gpu> gpu, std::shared_ptr<Pool> pool, size_t bytes)
      : gpu_(std::move(gpu)), pool_(std::move(pool)), wished_(bytes) {}

  // The next layer, which must be there whenever a step runs. Null: one that is not sent.
  void add(const SentExperts* layer);
  bool sends(size_t layer) const { return layers_[layer] != nullptr; }
  bool any() const;
  bool all() const;           // of them are sent
  size_t first() const;       // layer that is sent, where there is any()
  size_t slot_bytes() const;  // of as many bytes in all as were wished for, and room for an expert
  size_t bytes() const;       // that allocate() takes
  void allocate();

  // A step begins and ends: nothing of it is under way behind its end.
  void begin();
  void drain();
  // Experts of the layer whose byte in `skip` is 0 are sent from here on, behind those that were wanted before. Null:
  // all of them.
  void want(size_t layer, const uint8_t* skip);
  // What was wanted of the layer, which is next: run(copies) asks `compute` for what reads a batch, once for each.
  void take(size_t layer, GpuStream& compute, FunctionRef<void(const GpuExperts::Copies&)> run);
  uint64_t sent_bytes() const { return sent_; }  // since this was made

 private:
  static constexpr size_t kSlots = 4;
  struct Batch {
    size_t layer = 0;
    std::vector<int> experts;
  };
  struct Slot {
    DeviceBuffer memory;
    GpuEvent arrived, freed;
    PinnedBuffer stage;  // of layers that are not page-locked
  };
  int batch_experts(const SentExperts& layer) const;
  int most_experts() const;
  std::vector<size_t> places(const SentExperts& layer) const;  // of parts in a slot
  void pump();
  void send(size_t number);
  const std::byte* staged(Slot& slot, const SentExperts::Part& part, size_t place,
                          std::span<const int> experts);

  std::shared_ptr<const Gpu> gpu_;
  std::shared_ptr<Pool> pool_;
  size_t wished_;
  std::vector<const SentExperts*> layers_;
  std::unique_ptr<GpuStream> copies_;
  std::vector<Slot> slots_;
  PinnedBuffer tables_;  // [batches of a step, experts]
  std::vector<Batch> batches_;
  size_t issued_ = 0, taken_ = 0;
  uint64_t sent_ = 0;
};

}  // namespace kt::inline nn
