#include "base/fork_mutex.h"

#include <pthread.h>

#include <array>

#include "base/error.h"

namespace kt::inline base {
namespace {

constinit std::atomic<uint32_t> counted{0};
constinit std::array<std::atomic<ForkMutex*>, ForkMutex::kLocks> all{};
thread_local std::array<bool, ForkMutex::kLocks> held_for_fork{};

}  // namespace

uint32_t forks() noexcept { return counted.load(std::memory_order_relaxed); }

ForkMutex::ForkMutex(ForkLock which) {
  ForkMutex* nobody = nullptr;
  const auto at = static_cast<size_t>(which);
  if (at >= kLocks || !all[at].compare_exchange_strong(nobody, this))
    fail_as(ErrorKind::kInternal, "fork mutex: lock {} of {} was made before or does not exist", at, kLocks);
  static const int once = ::pthread_atfork(&before_fork, &after_fork, &in_child);
  if (once != 0) fail_as(ErrorKind::kMemory, "fork mutex: no memory for a fork handler");
}

void ForkMutex::lock() {
  mutex_.lock();
  owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

void ForkMutex::unlock() {
  owner_.store({}, std::memory_order_relaxed);
  mutex_.unlock();
}

void ForkMutex::before_fork() {
  for (size_t i = 0; i < all.size(); ++i) {
    ForkMutex* const it = all[i].load();
    held_for_fork[i] = it && it->owner_.load(std::memory_order_relaxed) != std::this_thread::get_id();
    if (held_for_fork[i]) it->lock();
  }
}

void ForkMutex::after_fork() {
  for (size_t i = all.size(); i-- > 0;)
    if (held_for_fork[i]) all[i].load()->unlock();
  held_for_fork = {};
}

void ForkMutex::in_child() {
  counted.fetch_add(1, std::memory_order_relaxed);
  after_fork();
}

}  // namespace kt::inline base
