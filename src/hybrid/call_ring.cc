#include "hybrid/call_ring.h"

#include "hybrid/stream_call.h"

namespace kt::inline hybrid {
namespace {

// A slot has one message on its way at most, and a context has fewer slots (StreamSlots).
constexpr uint32_t kWords = 8192;

}  // namespace

CallRing::CallRing(uint32_t number, const std::shared_ptr<CpuTeam>& team)
    : memory_(kWords * sizeof(uint64_t)),
      ring_{.words = reinterpret_cast<uint64_t*>(memory_.data()), .count = kWords, .number = number},
      team_(team) {}

std::atomic_ref<uint64_t> CallRing::word(uint64_t at) const noexcept {
  return std::atomic_ref(ring_.words[at & (kWords - 1)]);
}

bool CallRing::ready() const noexcept {
  const uint64_t message = word(taken_.load(std::memory_order_relaxed)).load(std::memory_order_acquire);
  return message != 0 && reinterpret_cast<const StreamCall*>(message)->can_start();
}

void CallRing::take() noexcept {
  const uint64_t at = taken_.load(std::memory_order_relaxed);
  StreamCall::start(reinterpret_cast<StreamCall*>(word(at).load(std::memory_order_acquire)));
  word(at).store(0, std::memory_order_release);  // submitted: whoever asks need not count it
  taken_.store(at + 1, std::memory_order_release);
}

bool CallRing::holds(const StreamCall& call) const noexcept {
  for (uint64_t at = 0; at < kWords; ++at)
    if (word(at).load(std::memory_order_acquire) == reinterpret_cast<uintptr_t>(&call)) return true;
  return false;
}

uint64_t CallRing::asked() const noexcept {
  uint64_t at = taken();
  while (word(at).load(std::memory_order_relaxed) != 0) ++at;
  return at;
}

}  // namespace kt::inline hybrid
