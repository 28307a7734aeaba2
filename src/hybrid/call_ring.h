// Messages of a GPU to a team: each names a StreamCall whose input is in its slot. The team's thread takes
// them.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

#include "cuda/driver.h"
#include "hybrid/cpu_team.h"

namespace kt::inline hybrid {

struct StreamCall;

class CallRing final : public TaskSource {
 public:
  // Of the current context, which has no other ring of that number. `team` is the one that listens.
  CallRing(uint32_t number, const std::shared_ptr<CpuTeam>& team);

  const CudaRing& cuda() const { return ring_; }
  // Calls that may come without a word: those in a stream, and those of a graph as long as it can be
  // replayed.
  void expect(int more) noexcept { expected_.fetch_add(more, std::memory_order_seq_cst); }

  // Its message is there and not taken. Asked when the GPU writes no more for it.
  bool holds(const StreamCall& call) const noexcept;
  // Messages are behind a place that is empty: another stream is about to fill it, or the GPU failed there.
  bool has_gap() const noexcept { return word(taken()).load(std::memory_order_acquire) == 0; }

  // Not while the call still has tasks of a replay before.
  bool ready() const noexcept override;
  void take() noexcept override;
  uint64_t asked() const noexcept override;
  uint64_t taken() const noexcept override { return taken_.load(std::memory_order_acquire); }
  bool expecting() const noexcept override { return expected_.load(std::memory_order_seq_cst) > 0; }

  // For the next team, when the one before has ended. Whoever calls it is the only owner.
  void pass_on(const std::shared_ptr<CpuTeam>& team) { team_ = team; }
  bool is_of(const std::shared_ptr<CpuTeam>& team) const { return team_.lock() == team; }

 private:
  std::atomic_ref<uint64_t> word(uint64_t at) const noexcept;

  PinnedBuffer memory_;
  CudaRing ring_;
  std::weak_ptr<CpuTeam> team_;
  std::atomic<uint64_t> taken_{0};  // written by the team's thread
  std::atomic<int> expected_{0};
};

}  // namespace kt::inline hybrid
