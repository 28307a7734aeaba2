#include "base/signal.h"

#include <climits>

#include "base/park.h"

namespace kt::inline base {

void Signal::set() noexcept {
  // A waiter that sees kSet may destroy *this before the wake below. That is safe: waking looks up an address
  // and touches no memory behind it, and whoever sleeps there by then loops on its own condition.
  if (state_.exchange(kSet, std::memory_order_acq_rel) == kAwaited) futex_wake(state_, INT_MAX);
}

void Signal::wait() const noexcept { wait(default_spin_time()); }

void Signal::wait(std::chrono::nanoseconds spin) const noexcept {
  if (spin_until([this] { return is_set(); }, spin)) return;
  uint32_t seen = kUnset;
  // Announce a sleeper; fails if somebody else did already, or if the flag was set meanwhile.
  if (state_.compare_exchange_strong(seen, kAwaited, std::memory_order_acquire)) seen = kAwaited;
  while (seen != kSet) {
    futex_wait(state_, kAwaited);
    seen = state_.load(std::memory_order_acquire);
  }
}

}  // namespace kt::inline base
