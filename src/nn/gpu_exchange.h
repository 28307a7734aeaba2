// Memory and words between a GPU and the host's experts: rows go out when their kernels have them, the thread that runs
// the step watches for them, computes and says when it is done; kernels that need the result wait for that word.
// Whoever waits notices the other's end. Used by gpu_ops.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/kernels/args.h"

namespace kt::inline nn {

class GpuExchange {
 public:
  // Rows of `width` for one layer at a time; ids stay for as many layers of a replayed step.
  struct Sizes {
    int64_t tokens = 0, width = 0, top_k = 0;
    int64_t layers = 0, step_tokens = 0;  // of replayed steps
    bool operator==(const Sizes&) const = default;
  };
  void allocate(const std::shared_ptr<const Gpu>& gpu, const Sizes& sizes);
  const Sizes& sizes() const { return sizes_; }
  static size_t host_bytes(const Sizes& sizes);

  // The next step; its number goes with its tables.
  uint32_t next_step();

  // What its kernels take. Ids of layer `ids_of` of a replayed step stand apart; of others at 0.
  PostRowsArgs post(const StepWords* step, int layer, int64_t ids_of) const;
  FetchedRows fetched(const StepWords* step, int layer) const;
  EndStepArgs end(const StepWords* step) const;

  // Page-locked.
  const float* rows() const { return at<float>(rows_); }
  const int32_t* ids(int64_t layer) const {
    return at<int32_t>(ids_) + layer * sizes_.step_tokens * sizes_.top_k;
  }
  const float* weights() const { return at<float>(weights_); }
  float* out() const { return at<float>(out_); }
  // How long kernels waited for answers since this was asked last; of a step that has ended.
  std::chrono::nanoseconds waited();

  // Which layer of the step has posted, or kEndOfStep; not before the one that was answered last. Throws where the
  // stream has failed, or ends without another word.
  int wait(GpuStream& stream);
  void answer(int layer);  // out() is there
  void give_up();          // who waits goes on without; until the next step

 private:
  template <typename T>
  static T* at(const PinnedBuffer& buffer) {
    return reinterpret_cast<T*>(buffer.data());
  }
  std::atomic_ref<uint32_t> posted() const { return std::atomic_ref(*at<uint32_t>(words_)); }
  std::atomic_ref<uint32_t> done() const { return std::atomic_ref(*(at<uint32_t>(words_) + kWordsApart)); }

  static constexpr size_t kWordsApart = 32;  // each a line of its own
  Sizes sizes_;
  PinnedBuffer rows_, out_, ids_, weights_, words_;
  DeviceBuffer counters_;  // arrived, pairs, cold; nanoseconds waited
  uint32_t number_ = 0, seen_ = 0;
  uint64_t told_ = 0;  // of what kernels waited
};

}  // namespace kt::inline nn
