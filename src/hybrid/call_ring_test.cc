// On the test driver, or on a GPU with KT_TEST_REAL_CUDA=1.
#include "hybrid/call_ring.h"

#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <thread>
#include <vector>

#include "cuda/testing/test_cuda.h"
#include "hybrid/stream_call.h"
#include "hybrid/streams.h"

namespace kt::inline hybrid {
namespace {

// Rings of a context are few: threads that ask at once for one team use up one.
TEST(CallRings, AreOnePerTeamHoweverManyAsk) {
  constexpr int kThreads = 8, kRounds = 100;
  const std::vector<char> contexts(kRounds);  // nobody else's
  const auto team = std::make_shared<CpuTeam>(CpuTeamOptions{.threads = 1});
  for (const char& context : contexts) {
    std::vector<std::shared_ptr<CallRing>> rings(kThreads);
    std::barrier together(kThreads);
    std::vector<std::jthread> threads;
    for (std::shared_ptr<CallRing>& ring : rings)
      threads.emplace_back([&] {
        kTestCuda.use_device();
        together.arrive_and_wait();
        ring = ring_of(team, &context);
      });
    threads.clear();
    ASSERT_NE(rings.front(), nullptr);
    for (const std::shared_ptr<CallRing>& ring : rings) EXPECT_EQ(ring, rings.front());
  }
}

TEST(CallRings, ComeFromTeamsThatEnded) {
  kTestCuda.use_device();
  const char context = 0;
  for (uint32_t i = 0; i < 2 * CudaRing::kMost; ++i) {
    const auto team = std::make_shared<CpuTeam>(CpuTeamOptions{.threads = 1});
    const std::shared_ptr<CallRing> ring = ring_of(team, &context);
    ASSERT_NE(ring, nullptr) << i;
    EXPECT_TRUE(ring->is_of(team));
    EXPECT_EQ(ring->cuda().number, 0u);
  }
}

// A call that says it is busy.
struct BusyCall {
  uint32_t busy = 1;
  StreamCall it;
  explicit BusyCall(std::shared_ptr<CallRing> ring) {
    it.ring = std::move(ring);
    it.busy = &busy;
  }
};

TEST(CallRings, ALetterThatNeverCameIsNotWaitedFor) {
  kTestCuda.use_device();
  const char context = 0;
  const auto team = std::make_shared<CpuTeam>(CpuTeamOptions{.threads = 1});
  const BusyCall call(ring_of(team, &context));
  EXPECT_FALSE(call.it.ring->holds(call.it));
  EXPECT_TRUE(call.it.wait_for_ring());
}

TEST(CallRings, ALetterBehindAGapIsWaitedForOnlySoLong) {
  kTestCuda.use_device();
  const char context = 0;
  const auto team = std::make_shared<CpuTeam>(CpuTeamOptions{.threads = 1});
  const BusyCall call(ring_of(team, &context));
  const CallRing& ring = *call.it.ring;
  uint64_t& second = ring.cuda().words[(ring.taken() + 1) % ring.cuda().count];
  std::atomic_ref(second).store(reinterpret_cast<uintptr_t>(&call.it));
  EXPECT_TRUE(ring.holds(call.it) && ring.has_gap());
  EXPECT_FALSE(call.it.wait_for_ring(std::chrono::milliseconds(30)));
  std::atomic_ref(second).store(0);
  EXPECT_TRUE(call.it.wait_for_ring());
}

}  // namespace
}  // namespace kt::inline hybrid
