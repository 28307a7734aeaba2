// How a thread waits for another: first spin for a bounded time, then sleep in the kernel. The floor under
// Signal and Pool; other code wants those.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "base/cpu.h"

namespace kt::inline base {

// How long a wait may spin. A sleep and a wake-up cost 5 to 50 us, so spinning pays for short waits; longer
// spins burn the very core that the awaited thread may need (a hypervisor that runs two virtual CPUs on one
// core turns an unbounded spin into a stall of milliseconds).
inline constexpr std::chrono::nanoseconds kSpinTime{30'000};

// kSpinTime, or zero where this process has a single cpu: there, nobody can make progress while we spin.
std::chrono::nanoseconds default_spin_time() noexcept;

// Sleeps while word == expected and nobody wakes it. May return early for no reason: call it in a loop.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected) noexcept;
// The same, at most about so long.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, std::chrono::nanoseconds most) noexcept;

// Wakes up to `count` threads that sleep on the word.
void futex_wake(const std::atomic<uint32_t>& word, int count) noexcept;

enum class Spin {
  kAlone,   // has the cpu for itself
  kYields,  // gives way to whoever else wants the cpu
};

// Spins until done() is true, at most about `budget`. Returns the last value of done().
template <typename Done>
bool spin_until(Done done, std::chrono::nanoseconds budget, Spin how = Spin::kAlone) {
  if (done()) return true;
  if (budget.count() <= 0) return false;
  // The clock costs as much as several looks at the flag, so it is read once in a while; a thread that was
  // descheduled in here notices at its next reading and gives up its core.
  constexpr int kLooks = 16;
  const auto deadline = std::chrono::steady_clock::now() + budget;
  do {
    for (int i = 0; i < kLooks; ++i) {
      cpu_relax();
      if (done()) return true;
    }
    if (how == Spin::kYields) std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

}  // namespace kt::inline base
