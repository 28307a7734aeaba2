// On the test driver, or on a GPU with KT_TEST_REAL_CUDA=1.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "cuda/driver.h"
#include "cuda/testing/driver_fixture.h"

namespace kt::inline cuda {
namespace {

using testing::HasSubstr;

constexpr uint32_t kWords = 8;

std::vector<uint32_t> counting(size_t size, uint32_t first) {
  std::vector<uint32_t> out(size);
  std::iota(out.begin(), out.end(), first);
  return out;
}

class PostTest : public CudaDriverTest {
 protected:
  void SetUp() override {
    CudaDriverTest::SetUp();
    if (IsSkipped()) return;
    if (!driver().posts()) GTEST_SKIP() << "this GPU does not take KT's kernels, or KT_CUDA_POST is 0";
    ring.number = next_number++ % CudaRing::kMost;
  }

  std::atomic_ref<uint32_t> busy() const {
    return std::atomic_ref(*reinterpret_cast<uint32_t*>(slot.data()));
  }
  const uint32_t* numbers(size_t at) const { return reinterpret_cast<const uint32_t*>(slot.data() + at); }

  void post(uint64_t message, const CudaPiece& large, const CudaPiece& first, const CudaPiece& second) {
    driver().post(reinterpret_cast<uint32_t*>(slot.data()), large, first, second, ring, message, stream);
  }
  // The message that comes next, waited for.
  uint64_t next_message() {
    const std::atomic_ref word(ring.words[taken++ % kWords]);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(5);
    while (word.load(std::memory_order_acquire) == 0 && std::chrono::steady_clock::now() < deadline)
      std::this_thread::yield();
    return word.exchange(0);
  }

  static inline uint32_t next_number = 0;  // rings of a context count on
  const TestStream stream;
  PinnedBuffer slot{64 << 10}, words{kWords * sizeof(uint64_t)};
  CudaRing ring{.words = reinterpret_cast<uint64_t*>(words.data()), .count = kWords};
  uint64_t taken = 0;
};

TEST_F(PostTest, CarriesPiecesThereAndBack) {
  for (const size_t size : {4u, 128u, 2048u, 8192u}) {
    const DeviceArray<uint32_t> large(counting(size, 1)), first(counting(size / 4 + 1, 7)),
        second(counting(3, 9)), back(size);
    const size_t first_at = 64 + size * 4, second_at = first_at + (size / 4 + 1) * 4;
    post(77, {slot.data() + 64, large.data(), size * 4},
         {slot.data() + first_at, first.data(), first.size() * 4},
         {slot.data() + second_at, second.data(), 12});
    ASSERT_EQ(next_message(), 77u);
    EXPECT_EQ(busy().load(), 1u);
    EXPECT_EQ(std::vector(numbers(64), numbers(64) + size), counting(size, 1));
    EXPECT_EQ(std::vector(numbers(first_at), numbers(first_at) + first.size()), counting(first.size(), 7));
    EXPECT_EQ(std::vector(numbers(second_at), numbers(second_at) + 3), counting(3, 9));
    for (size_t i = 0; i < size; ++i) reinterpret_cast<uint32_t*>(slot.data() + 64)[i] += 1000;
    driver().fetch(reinterpret_cast<uint32_t*>(slot.data()), {back.data(), slot.data() + 64, size * 4},
                   stream);
    busy().store(0, std::memory_order_release);
    stream.wait();
    EXPECT_EQ(back.read(), counting(size, 1001)) << size;
    // The second word of the ring is next only if the first was taken; the ring of 8 wraps in this test.
    for (int i = 0; i < 3; ++i) {
      post(5, {}, {}, {});
      ASSERT_EQ(next_message(), 5u);
      busy().store(0, std::memory_order_release);
    }
  }
}

TEST_F(PostTest, TheStreamWaitsForTheHost) {
  const DeviceArray<uint32_t> back(4);
  back.write(counting(4, 90));
  post(1, {}, {}, {});
  driver().fetch(reinterpret_cast<uint32_t*>(slot.data()), {back.data(), slot.data() + 64, 16}, stream);
  ASSERT_EQ(next_message(), 1u);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_NE(kTestCuda.ask("cuStreamQuery", static_cast<CudaStream>(stream)), 0);
  std::memcpy(slot.data() + 64, counting(4, 40).data(), 16);
  busy().store(0, std::memory_order_release);
  stream.wait();
  EXPECT_EQ(back.read(), counting(4, 40));
}

// Two messages of one slot: the second comes when the first is answered, and finds its own bytes.
TEST_F(PostTest, ASlotThatIsBusyIsLeftAlone) {
  const DeviceArray<uint32_t> first(counting(4, 1)), second(counting(4, 11));
  post(1, {slot.data() + 64, first.data(), 16}, {}, {});
  post(2, {slot.data() + 64, second.data(), 16}, {}, {});
  ASSERT_EQ(next_message(), 1u);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(std::atomic_ref(ring.words[taken % kWords]).load(), 0u);
  EXPECT_EQ(std::vector(numbers(64), numbers(64) + 4), counting(4, 1));
  busy().store(0, std::memory_order_release);
  ASSERT_EQ(next_message(), 2u);
  EXPECT_EQ(std::vector(numbers(64), numbers(64) + 4), counting(4, 11));
  busy().store(0, std::memory_order_release);
  stream.wait();
}

TEST_F(PostTest, IsReplayed) {
  const DeviceArray<uint32_t> from(counting(4, 1)), back(4);
  const TestGraph graph(stream, [&] {
    post(3, {slot.data() + 64, from.data(), 16}, {}, {});
    driver().fetch(reinterpret_cast<uint32_t*>(slot.data()), {back.data(), slot.data() + 64, 16}, stream);
  });
  for (uint32_t replay = 1; replay <= 20; ++replay) {
    from.write(counting(4, 100 * replay));
    graph.launch(stream);
    ASSERT_EQ(next_message(), 3u);
    EXPECT_EQ(numbers(64)[3], 100 * replay + 3);
    reinterpret_cast<uint32_t*>(slot.data() + 64)[3] = replay;
    busy().store(0, std::memory_order_release);
    stream.wait();
    EXPECT_EQ(back.read()[3], replay);
  }
}

// Launches of a graph that waits for the host: how many a driver takes before it keeps the caller waiting is
// its own affair, told here for graphs whose end is watched and for others. All are done in the end.
TEST_F(PostTest, TakesLaunchesAheadOrKeepsThemWaiting) {
  constexpr int kLaunches = 50;
  for (const bool watched : {false, true}) {
    std::atomic<int> ended = 0, launched = 0;
    {
      const TestGraph graph(stream, [&] {
        if (watched) driver().at_end_of_graph(count, &ended, stream);
        post(1, {}, {}, {});
      });
      std::thread launches([&] {
        kTestCuda.use_device();
        for (; launched < kLaunches; ++launched) graph.launch(stream);
      });
      for (int seen = -1, still = 0; still < 20 && launched < kLaunches; ++still) {
        if (seen != launched) still = 0;
        seen = launched;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      std::printf("  %d launches of %d were taken ahead, the end of the graph %s\n", launched.load(),
                  kLaunches, watched ? "watched" : "not watched");
      for (int i = 0; i < kLaunches; ++i) {
        EXPECT_EQ(next_message(), 1u);
        busy().store(0, std::memory_order_release);
      }
      launches.join();
      stream.wait();
    }
    EXPECT_EQ(launched, kLaunches);
    // A driver tells the end of a graph when it likes: `ended` is there until then.
    wait_for(ended, watched ? 1 : 0);
    EXPECT_EQ(ended, watched ? 1 : 0);
  }
}

TEST_F(PostTest, RefusesPiecesInOddPlaces) {
  const DeviceArray<uint32_t> from(8);
  EXPECT_THAT(error_of([&] { post(1, {slot.data() + 64, from.data() + 1, 16}, {}, {}); }).what(),
              HasSubstr("a piece of 16 bytes at "));
  EXPECT_THAT(error_of([&] { post(1, {slot.data() + 64, from.data(), 12}, {}, {}); }).what(),
              HasSubstr("multiples of 16"));
}

}  // namespace
}  // namespace kt::inline cuda
