// Runs on the driver of cuda/testing. On a machine with a GPU, KT_TEST_REAL_CUDA=1 cuda_test runs the same
// tests on its own driver; those that inject errors are skipped there.
#include "cuda/driver.h"

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/memory.h"
#include "cuda/testing/driver_fixture.h"

namespace kt::inline cuda {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

TEST_F(CudaDriverTest, SaysWhatItFound) {
  if (TestCuda::real())
    EXPECT_THAT(cuda_driver_status(), AllOf(StartsWith("CUDA "), HasSubstr("device")));
  else
    EXPECT_EQ(cuda_driver_status(), "CUDA 13.1, 1 device");
  EXPECT_EQ(cuda_driver(), cuda_driver());
}

TEST_F(CudaDriverTest, CopiesBetweenAllKindsOfMemory) {
  const size_t n = 1009;
  const TestStream stream;
  const DeviceArray<int> first(n), second(n);
  const PinnedBuffer in(n * sizeof(int)), out(n * sizeof(int));
  const std::vector<int> values = numbers(n, 7);
  std::memcpy(in.data(), values.data(), in.size());
  driver().copy(first.data(), in.data(), in.size(), stream);
  driver().copy(second.data(), first.data(), in.size(), stream);
  driver().copy(out.data(), second.data(), in.size(), stream);
  std::vector<int> ordinary(n);
  driver().copy(ordinary.data(), second.data(), in.size(), stream);
  driver().wait(stream);
  EXPECT_EQ(std::memcmp(out.data(), values.data(), in.size()), 0);
  EXPECT_EQ(ordinary, values);
  EXPECT_EQ(second.read(), values);
}

TEST_F(CudaDriverTest, CopiesPartsOfMemory) {
  const TestStream stream;
  const DeviceArray<int> values(numbers(10));
  const PinnedBuffer some(3 * sizeof(int));
  driver().copy(some.data(), values.data() + 7, some.size(), stream);
  driver().wait(stream);
  std::array<int, 3> read;
  std::memcpy(read.data(), some.data(), some.size());
  EXPECT_EQ(read, (std::array{7, 8, 9}));
}

TEST_F(CudaDriverTest, NoBytesAreNoCopy) {
  const TestStream stream;
  driver().copy(nullptr, nullptr, 0, stream);
  driver().wait(stream);
}

TEST_F(CudaDriverTest, CopiesWhenTheStreamGetsThere) {
  const TestStream stream;
  const PinnedBuffer from(4), to(4);
  const DeviceArray<char> device(4);
  StreamGate gate;
  driver().call(StreamGate::hold, &gate, stream);
  driver().copy(device.data(), from.data(), 4, stream);
  driver().copy(to.data(), device.data(), 4, stream);
  gate.wait();
  EXPECT_EQ(std::memcmp(to.data(), "\0\0\0", 4), 0);
  std::memcpy(from.data(), "abc", 4);
  gate.open = true;
  driver().wait(stream);
  EXPECT_EQ(std::memcmp(to.data(), "abc", 4), 0);
}

TEST_F(CudaDriverTest, CallsInOrder) {
  const TestStream stream;
  struct Step {
    std::vector<int>* order;
    int number;
  };
  std::vector<int> order;
  std::vector<Step> steps;
  for (int i = 0; i < 100; ++i) steps.push_back({&order, i});
  for (Step& step : steps)
    driver().call(
        [](void* argument) noexcept {
          const Step& step = *static_cast<Step*>(argument);
          step.order->push_back(step.number);
        },
        &step, stream);
  driver().wait(stream);
  EXPECT_EQ(order, numbers(100));
}

// Shown by copies: CUDA may run host functions of different streams one after the other.
TEST_F(CudaDriverTest, StreamsDoNotWaitForEachOther) {
  const TestStream held, other;
  const DeviceArray<int> values(numbers(4, 5));
  const PinnedBuffer first(4 * sizeof(int)), second(4 * sizeof(int));
  const auto copied = [](const PinnedBuffer& buffer) {
    return std::memcmp(buffer.data(), numbers(4, 5).data(), buffer.size()) == 0;
  };
  StreamGate gate;
  driver().call(StreamGate::hold, &gate, held);
  gate.wait();
  driver().copy(first.data(), values.data(), first.size(), other);
  driver().wait(other);
  EXPECT_TRUE(copied(first));
  const TestEvent event;
  event.record(held);
  EXPECT_FALSE(event.passed());
  event.hold(other);
  driver().copy(second.data(), values.data(), second.size(), other);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(copied(second));
  gate.open = true;
  driver().wait(other);
  EXPECT_TRUE(copied(second));
  EXPECT_TRUE(event.passed());
}

TEST_F(CudaDriverTest, NullStreamFollowsBlockingStreams) {
  const TestStream blocking(TestStream::Kind::kBlocking);
  StreamGate gate;
  std::atomic<int> calls = 0;
  driver().call(StreamGate::hold, &gate, blocking);
  driver().call(count, &calls, nullptr);
  gate.wait();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(calls, 0);
  gate.open = true;
  driver().wait(nullptr);
  EXPECT_EQ(calls, 1);
}

TEST_F(CudaDriverTest, ThreadsWithoutContextGetOne) {
  const TestStream stream;
  std::atomic<int> calls = 0;
  std::thread([&] { driver().call(count, &calls, stream); }).join();
  std::thread([&] { driver().wait(stream); }).join();
  EXPECT_EQ(calls, 1);
  std::thread([&] {
    const PinnedBuffer buffer(100);
    CudaContext context = nullptr;
    kTestCuda.call("cuCtxGetCurrent", &context);
    EXPECT_NE(context, nullptr);
  }).join();
}

TEST_F(CudaDriverTest, CapturesAndReplays) {
  const TestStream stream;
  const DeviceArray<int> from(numbers(5)), to(5);
  const PinnedBuffer between(5 * sizeof(int));
  std::atomic<int> calls = 0;
  const auto record = [&] {
    driver().copy(between.data(), from.data(), between.size(), stream);
    driver().call(count, &calls, stream);
    driver().copy(to.data(), between.data(), between.size(), stream);
  };
  to.write(numbers(5, 90));
  const TestGraph graph(stream, record);
  driver().wait(stream);
  EXPECT_EQ(calls, 0);
  EXPECT_EQ(to.read(), numbers(5, 90));
  for (int replay = 1; replay <= 3; ++replay) {
    from.write(numbers(5, 10 * replay));
    graph.launch(stream);
    driver().wait(stream);
    EXPECT_EQ(calls, replay);
    EXPECT_EQ(to.read(), numbers(5, 10 * replay));
  }
  const TestStream other;
  graph.launch(other);
  graph.launch(stream);
  driver().wait(other);
  driver().wait(stream);
  EXPECT_EQ(calls, 5);
}

TEST_F(CudaDriverTest, EveryCaptureHasItsNumber) {
  const TestStream first, second;
  EXPECT_EQ(driver().capture(first), 0u);
  EXPECT_EQ(driver().capture(nullptr), 0u);
  std::vector<uint64_t> ids;
  for (int i = 0; i < 3; ++i) {
    const auto record = [&] {
      ids.push_back(driver().capture(first));
      EXPECT_EQ(driver().capture(first), ids.back());
      EXPECT_EQ(driver().capture(second), 0u);
      const TestGraph inner(
          second, [&] { ids.push_back(driver().capture(second)); }, TestGraph::Mode::kRelaxed);
    };
    const TestGraph outer(first, record, TestGraph::Mode::kRelaxed);
    EXPECT_EQ(driver().capture(first), 0u);
  }
  EXPECT_THAT(ids, testing::Each(testing::Ne(0u)));
  std::ranges::sort(ids);
  EXPECT_EQ(std::ranges::adjacent_find(ids), ids.end());
}

TEST_F(CudaDriverTest, TellsTheEndOfAGraph) {
  const TestStream stream;
  StreamGate gate;
  std::atomic<int> ended = 0, calls = 0;
  {
    const TestGraph graph(stream, [&] {
      driver().at_end_of_graph(count, &ended, stream);
      driver().call(&StreamGate::hold, &gate, stream);
      driver().call(count, &calls, stream);
      driver().at_end_of_graph(count, &ended, stream);
    });
    EXPECT_EQ(ended, 0);
    graph.launch(stream);
    gate.wait();
  }
  EXPECT_EQ(ended, 0) << "it still runs";
  gate.open = true;
  driver().wait(stream);
  wait_for(ended, 2);
  EXPECT_EQ(ended, 2);
  EXPECT_EQ(calls, 1);
  EXPECT_STREQ(error_of([&] { driver().at_end_of_graph(count, &ended, stream); }).what(),
               "CUDA cannot name the graph of a stream that is not captured");
  EXPECT_EQ(ended, 2);
}

TEST_F(CudaDriverTest, StreamsThatJoinACaptureShareItsNumber) {
  const TestStream origin, side;
  const TestEvent fork, join;
  std::atomic<int> calls = 0;
  const TestGraph graph(origin, [&] {
    driver().call(count, &calls, origin);
    fork.record(origin);
    fork.hold(side);
    EXPECT_EQ(driver().capture(side), driver().capture(origin));
    EXPECT_NE(driver().capture(side), 0u);
    driver().call(count, &calls, side);
    join.record(side);
    join.hold(origin);
  });
  EXPECT_EQ(driver().capture(side), 0u);
  graph.launch(side);
  driver().wait(side);
  EXPECT_EQ(calls, 2);
}

TEST_F(CudaDriverTest, WaitingWhileCapturingSparesTheCapture) {
  const TestStream stream;
  std::atomic<int> calls = 0;
  const TestGraph graph(stream, [&] {
    const Error error = error_of([&] { driver().wait(stream); });
    EXPECT_THAT(error.what(), HasSubstr("while it is captured"));
    EXPECT_EQ(error.kind(), ErrorKind::kInternal);
    driver().call(count, &calls, stream);
  });
  graph.launch(stream);
  driver().wait(stream);
  EXPECT_EQ(calls, 1);
}

TEST_F(CudaDriverTest, PinsWhileAnyThreadCaptures) {
  const TestStream stream;
  const TestGraph graph(stream, [&] {
    {
      const PinnedBuffer own(100);
    }
    std::thread([&] { const PinnedBuffer of_another_thread(100); }).join();
    EXPECT_NE(driver().capture(stream), 0u);
  });
  graph.launch(stream);
  driver().wait(stream);
}

TEST_F(CudaDriverTest, ManyCallsDoNotGrow) {
  const TestStream stream, other;
  const DeviceArray<char> device(64);
  const PinnedBuffer host(64);
  std::atomic<int> calls = 0;
  const TestGraph graph(stream, [&] { driver().call(count, &calls, stream); });
  const auto round = [&](int times) {
    for (int i = 0; i < times; ++i) {
      driver().copy(device.data(), host.data(), 64, stream);
      driver().call(count, &calls, i % 2 ? stream : other);
      if (i % 10 == 0) graph.launch(stream);
      if (i % 100 == 0) driver().wait(stream), driver().wait(other);
      const PinnedBuffer again(i % 100 == 0 ? 10'000 : 0);
    }
    driver().wait(stream);
    driver().wait(other);
  };
  round(1000);
  const uint64_t before = own_memory();
  round(10'000);
  EXPECT_EQ(calls, 11'000 + 1100);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they keep what was freed, and shadows
  // 100 B for each copy and call would be 2 MB.
  EXPECT_LT(own_memory(), before + 1'000'000);
#else
  EXPECT_LT(own_memory(), before + 100'000'000);
#endif
}

TEST_F(CudaDriverTest, ManyThreadsAtOnce) {
  std::vector<std::thread> threads;
  std::atomic<int> calls = 0;
  const TestStream shared;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      const TestStream stream;
      const DeviceArray<int> device(16);
      const PinnedBuffer in(64), out(64);
      for (int i = 0; i < 100; ++i) {
        const std::vector<int> values = numbers(16, 100 * t + i);
        std::memcpy(in.data(), values.data(), 64);
        driver().copy(device.data(), in.data(), 64, stream);
        driver().copy(out.data(), device.data(), 64, stream);
        driver().call(count, &calls, shared);
        driver().wait(stream);
        EXPECT_EQ(std::memcmp(out.data(), values.data(), 64), 0);
      }
    });
  for (std::thread& thread : threads) thread.join();
  driver().wait(shared);
  EXPECT_EQ(calls, 400);
}

TEST_F(CudaDriverTest, ForkedChildGetsErrors) {
  const TestStream stream;
  PinnedBuffer buffer(64);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto refused = [&](auto body) {
      try {
        body();
      } catch (const Error& error) {
        return std::string(error.what()).find("before fork()") != std::string::npos;
      }
      return false;
    };
    std::array<char, 4> memory;
    const CudaDriver* const driver = cuda_driver();
    int wrong = driver ? 0 : 1;
    if (!refused([&] { driver->copy(memory.data(), memory.data() + 2, 1, stream); })) wrong |= 2;
    if (!refused([&] { driver->call(count, nullptr, stream); })) wrong |= 4;
    if (!refused([&] { driver->capture(stream); })) wrong |= 8;
    if (!refused([&] { driver->wait(stream); })) wrong |= 16;
    if (!refused([&] { PinnedBuffer another(10); })) wrong |= 32;
    if (cuda_driver_status().find("before fork()") == std::string::npos) wrong |= 64;
    {
      const PinnedBuffer given_back = std::move(buffer);
    }
    ::_exit(wrong);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  std::atomic<int> calls = 0;
  driver().call(count, &calls, stream);
  driver().wait(stream);
  EXPECT_EQ(calls, 1);
}

TEST_F(CudaDriverTest, BuffersAreZeroAlignedAndMove) {
  PinnedBuffer first(1001);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first.data()) % 64, 0u);
  EXPECT_EQ(first.size(), 1001u);
  for (size_t i = 0; i < first.size(); ++i) ASSERT_EQ(first.data()[i], std::byte{0});
  std::byte* const data = first.data();
  PinnedBuffer second = std::move(first);
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(first.data(), nullptr);
  EXPECT_EQ(first.size(), 0u);
  PinnedBuffer third(5);
  third = std::move(second);
  EXPECT_EQ(third.data(), data);
  EXPECT_EQ(second.data(), nullptr);
  EXPECT_EQ(PinnedBuffer().data(), nullptr);
  EXPECT_EQ(PinnedBuffer(0).data(), nullptr);
}

}  // namespace
}  // namespace kt::inline cuda
