// Two small ways for threads to meet: a flag one waits for, and a count of arrivals.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/error.h"

namespace kt::inline base {

// A flag that threads wait for: spin first, then sleep. What was written before set() is visible after
// wait(). set() costs an atomic exchange, and a system call only if somebody sleeps. A waiter that has
// returned may destroy the Signal even while set() is still on its way out.
class Signal {
 public:
  Signal() = default;
  Signal(const Signal&) = delete;
  Signal& operator=(const Signal&) = delete;

  void set() noexcept;
  void wait() const noexcept;
  void wait(std::chrono::nanoseconds spin) const noexcept;  // with another limit on the spinning
  bool is_set() const noexcept { return state_.load(std::memory_order_acquire) == kSet; }

  // Back to unset. Only when nobody waits and nobody sets at the same time.
  void reset() noexcept { state_.store(kUnset, std::memory_order_relaxed); }

 private:
  enum : uint32_t { kUnset, kSet, kAwaited };  // kAwaited: unset, and somebody sleeps or is about to
  mutable std::atomic<uint32_t> state_{kUnset};
};

// Counts arrivals down from n. Exactly one arrive() returns true, the last; the thread that gets it sees what
// all others wrote before they arrived. One atomic subtraction, four bytes: make thousands. Put hot ones on
// cache lines of their own.
class Countdown {
 public:
  explicit Countdown(int n) : left_(n) { KT_DCHECK(n > 0, "countdown from {}", n); }
  Countdown(const Countdown&) = delete;
  Countdown& operator=(const Countdown&) = delete;

  bool arrive() noexcept { return left_.fetch_sub(1, std::memory_order_acq_rel) == 1; }

  // Starts over from n. Only when nobody arrives at the same time.
  void reset(int n) noexcept { left_.store(n, std::memory_order_relaxed); }

 private:
  std::atomic<int> left_;
};

}  // namespace kt::inline base
