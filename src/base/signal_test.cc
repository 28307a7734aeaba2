#include "base/signal.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

namespace kt::inline base {
namespace {

TEST(Signal, SetBeforeWait) {
  Signal signal;
  EXPECT_FALSE(signal.is_set());
  signal.set();
  EXPECT_TRUE(signal.is_set());
  signal.wait();
  signal.set();
  signal.reset();
  EXPECT_FALSE(signal.is_set());
}

TEST(Signal, PublishesWhatWasWritten) {
  for (int round = 0; round < 500; ++round) {
    Signal signal;
    int value = 0;
    std::thread setter([&] {
      value = 42;
      signal.set();
    });
    // Every other round sleeps at once, so that both ways of waiting meet a set().
    if (round % 2)
      signal.wait(std::chrono::nanoseconds(0));
    else
      signal.wait();
    EXPECT_EQ(value, 42);
    setter.join();
  }
}

TEST(Signal, WakesAllSleepers) {
  Signal signal;
  std::vector<std::thread> waiters;
  for (int i = 0; i < 6; ++i) waiters.emplace_back([&] { signal.wait(std::chrono::nanoseconds(0)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // likely parked; correct either way
  signal.set();
  for (auto& waiter : waiters) waiter.join();
}

TEST(Signal, ReusedInPingPong) {
  Signal ping, pong;
  constexpr int kRounds = 2000;
  std::thread other([&] {
    for (int i = 0; i < kRounds; ++i) {
      ping.wait();
      ping.reset();
      pong.set();
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    ping.set();
    pong.wait();
    pong.reset();
  }
  other.join();
}

TEST(Countdown, ExactlyOneIsLast) {
  constexpr int kThreads = 4, kCounts = 2000;
  std::vector<std::unique_ptr<Countdown>> counts;
  for (int i = 0; i < kCounts; ++i) counts.push_back(std::make_unique<Countdown>(kThreads));
  std::vector<int> written(kThreads * kCounts);
  std::atomic<int> last{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < kCounts; ++i) {
        written[static_cast<size_t>(i * kThreads + t)] = 1;
        if (!counts[static_cast<size_t>(i)]->arrive()) continue;
        int sum = 0;
        for (int u = 0; u < kThreads; ++u) sum += written[static_cast<size_t>(i * kThreads + u)];
        EXPECT_EQ(sum, kThreads);
        ++last;
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(last, kCounts);
}

TEST(Countdown, StartsOver) {
  Countdown count(1);
  EXPECT_TRUE(count.arrive());
  count.reset(2);
  EXPECT_FALSE(count.arrive());
  EXPECT_TRUE(count.arrive());
}

}  // namespace
}  // namespace kt::inline base
