#include "base/park.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/topology.h"

namespace kt::inline base {

namespace {

// The kernel wants the address of the 32 bits; std::atomic<uint32_t> is exactly those on every target.
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) &&
              std::atomic<uint32_t>::is_always_lock_free);

long futex(const std::atomic<uint32_t>& word, int operation, uint32_t value,
           const timespec* most = nullptr) noexcept {
  return syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), operation | FUTEX_PRIVATE_FLAG, value,
                 most, nullptr, 0);
}

}  // namespace

std::chrono::nanoseconds default_spin_time() noexcept {
  static const std::chrono::nanoseconds time = [] {
    try {
      return allowed_cpus().size() > 1 ? kSpinTime : std::chrono::nanoseconds(0);
    } catch (...) {
      return kSpinTime;
    }
  }();
  return time;
}

void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected) noexcept {
  futex(word, FUTEX_WAIT, expected);
}

void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected,
                std::chrono::nanoseconds most) noexcept {
  constexpr int64_t kSecond = 1'000'000'000;
  const timespec time{.tv_sec = static_cast<time_t>(most.count() / kSecond),
                      .tv_nsec = static_cast<long>(most.count() % kSecond)};
  futex(word, FUTEX_WAIT, expected, &time);
}

void futex_wake(const std::atomic<uint32_t>& word, int count) noexcept {
  futex(word, FUTEX_WAKE, static_cast<uint32_t>(count));
}

}  // namespace kt::inline base
