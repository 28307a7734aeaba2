#include "base/fork_mutex.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>

#include "base/error.h"

namespace kt::inline base {
namespace {

ForkMutex& test_mutex() {
  static ForkMutex& mutex = *std::make_unique<ForkMutex>(ForkLock::kOfATest).release();
  return mutex;
}

// 0 when the child could lock and unlock.
int child_that_locks(ForkMutex& mutex) {
  const uint32_t before = forks();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(300);
    mutex.lock();
    mutex.unlock();
    ::_exit(forks() == before + 1 ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(forks(), before);
  return status;
}

TEST(ForkMutex, IsOpenInTheChildWhoeverHeldIt) {
  ForkMutex& mutex = test_mutex();
  std::atomic<bool> stop = false;
  std::thread other([&] {
    while (!stop) {
      const std::lock_guard lock(mutex);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  for (int i = 0; i < 20; ++i) EXPECT_EQ(child_that_locks(mutex), 0) << i;
  stop = true;
  other.join();
}

TEST(ForkMutex, AThreadMayForkWhileItHoldsIt) {
  ForkMutex& mutex = test_mutex();
  const std::lock_guard lock(mutex);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(300);
    mutex.unlock();  // held here too
    mutex.lock();
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(ForkMutex, EveryLockIsMadeOnce) {
  test_mutex();
  EXPECT_THROW(ForkMutex(ForkLock::kOfATest), Error);
  EXPECT_THROW(ForkMutex(static_cast<ForkLock>(ForkMutex::kLocks)), Error);
}

}  // namespace
}  // namespace kt::inline base
