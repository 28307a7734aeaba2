#include "hybrid/call_ring.h"

#include "hybrid/stream_call.h"

namespace kt {
namespace {

// A slot has one letter on its way at most, and a context has fewer slots (StreamSlots).
constexpr uint32_t kWords = 8192;

}  // namespace

CallRing::CallRing(uint32_t number, const CpuTeam* team)
    : memory_(kWords * sizeof(uint64_t)),
      ring_{.words = reinterpret_cast<uint64_t*>(memory_.data()), .count = kWords, .number = number},
      team_(team) {}

std::atomic_ref<uint64_t> CallRing::next() const noexcept {
  return std::atomic_ref(ring_.words[taken_ & (kWords - 1)]);
}

bool CallRing::ready() const noexcept { return next().load(std::memory_order_acquire) != 0; }

void CallRing::take() noexcept {
  const uint64_t letter = next().load(std::memory_order_acquire);
  next().store(0, std::memory_order_relaxed);
  ++taken_;
  StreamCall::start(reinterpret_cast<StreamCall*>(letter));
}

}  // namespace kt
