// Runs on the driver of cuda/testing. On a machine with a GPU, KT_TEST_REAL_CUDA=1 cuda_test runs the same
// tests on its own driver; those that inject errors are skipped there.
#include "cuda/driver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "base/memory.h"
#include "cuda/testing/test_cuda.h"

namespace kt {
namespace {

using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

std::vector<int> numbers(size_t size, int first = 0) {
  std::vector<int> values(size);
  std::iota(values.begin(), values.end(), first);
  return values;
}

// The error that `body` throws; fails the test when there is none.
template <typename Body>
Error error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return Error(ErrorKind::kInput, "");
}

// A host function that holds a stream until it is opened, or for 20 s.
struct Gate {
  std::atomic<bool> reached = false, open = false;
  static void hold(void* argument) noexcept {
    Gate& gate = *static_cast<Gate*>(argument);
    gate.reached = true;
    for (int i = 0; i < 20'000 && !gate.open; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  void wait() const {
    while (!reached) std::this_thread::yield();
  }
};

void count(void* argument) noexcept { ++*static_cast<std::atomic<int>*>(argument); }

class CudaDriverTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(cuda_driver(), nullptr) << cuda_driver_status();
    kTestCuda.use_device();
  }
  void TearDown() override {
    if (!TestCuda::real()) kTestCuda.mend();
  }
  const CudaDriver& driver() { return *cuda_driver(); }
};

// What cannot be brought about on the machine's driver, or must not.
class InjectedErrorTest : public CudaDriverTest {
 protected:
  void SetUp() override {
    if (TestCuda::real()) GTEST_SKIP() << "errors cannot be injected into the machine's driver";
    CudaDriverTest::SetUp();
  }
};

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
  Gate gate;
  driver().call(Gate::hold, &gate, stream);
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

TEST_F(CudaDriverTest, StreamsDoNotWaitForEachOther) {
  const TestStream held, other;
  Gate gate;
  std::atomic<int> calls = 0;
  driver().call(Gate::hold, &gate, held);
  gate.wait();
  driver().call(count, &calls, other);
  driver().wait(other);
  EXPECT_EQ(calls, 1);
  const TestEvent event;
  event.record(held);
  EXPECT_FALSE(event.passed());
  event.hold(other);
  driver().call(count, &calls, other);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(calls, 1);
  gate.open = true;
  driver().wait(other);
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(event.passed());
}

TEST_F(CudaDriverTest, NullStreamFollowsBlockingStreams) {
  const TestStream blocking(TestStream::Kind::kBlocking);
  Gate gate;
  std::atomic<int> calls = 0;
  driver().call(Gate::hold, &gate, blocking);
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

TEST_F(InjectedErrorTest, TestDriverForbidsWhatCudaForbids) {
  const TestStream stream, side;
  const DeviceArray<int> device(4);
  int ordinary[4] = {};
  const auto spoil = [&](auto body) {
    try {
      const TestGraph graph(stream, body);
      return std::string("not spoilt");
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
  };
  void* memory = nullptr;
  EXPECT_EQ(spoil([&] { kTestCuda.ask("cuMemHostAlloc", &memory, size_t{8}, 0u); }),
            "cuStreamEndCapture: error 901");
  EXPECT_EQ(spoil([&] { stream.wait(); }), "cuStreamSynchronize: error 900");
  EXPECT_THAT(spoil([&] { driver().copy(ordinary, device.data(), 16, stream); }),
              HasSubstr("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"));
  const TestEvent event;
  EXPECT_EQ(spoil([&] {
              event.record(stream);
              event.hold(side);
            }),
            "cuStreamEndCapture: error 904");
  EXPECT_EQ(driver().capture(side), 0u);
}

TEST_F(InjectedErrorTest, InvalidCaptureIsAnError) {
  const TestStream stream;
  kTestCuda.call("cuStreamBeginCapture_v2", static_cast<CudaStream>(stream), 0);
  kTestCuda.ask("cuStreamSynchronize", static_cast<CudaStream>(stream));
  EXPECT_THAT(error_of([&] { driver().capture(stream); }).what(),
              HasSubstr("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"));
  void* graph = nullptr;
  EXPECT_EQ(kTestCuda.ask("cuStreamEndCapture", static_cast<CudaStream>(stream), &graph), 901);
  EXPECT_EQ(driver().capture(stream), 0u);
}

TEST_F(InjectedErrorTest, ErrorsHaveNamesAndNumbers) {
  const TestStream stream;
  const DeviceArray<char> device(64);
  const PinnedBuffer host(64);
  const auto failing = [&](const char* entry, CudaResult result, auto body) {
    kTestCuda.fail_next(entry, result);
    const Error error = error_of(body);
    EXPECT_EQ(error.kind(), result == 2 ? ErrorKind::kMemory : ErrorKind::kInternal);
    return std::string(error.what());
  };
  std::atomic<int> calls = 0;
  EXPECT_EQ(failing("cuMemcpyAsync", 1, [&] { driver().copy(device.data(), host.data(), 64, stream); }),
            "CUDA cannot copy 64 bytes in a stream: CUDA_ERROR_INVALID_VALUE (invalid argument)");
  EXPECT_EQ(
      failing("cuLaunchHostFunc", 400, [&] { driver().call(count, &calls, stream); }),
      "CUDA cannot call a host function in a stream: CUDA_ERROR_INVALID_HANDLE (invalid resource handle)");
  EXPECT_EQ(failing("cuStreamSynchronize", 700, [&] { driver().wait(stream); }),
            "CUDA cannot wait for a stream: CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was "
            "encountered)");
  EXPECT_EQ(failing("cuMemHostAlloc", 2, [&] { driver().pin(4096); }),
            "CUDA cannot lock 4096 bytes of memory: CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
  EXPECT_EQ(failing("cuMemHostAlloc", 2, [&] { PinnedBuffer(4096); }),
            "CUDA cannot lock 4096 bytes of memory: CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
  EXPECT_THAT(failing("cuStreamGetCaptureInfo_v2", 12345, [&] { driver().capture(stream); }),
              EndsWith(": CUDA error 12345"));
  // The one after is well again, and nothing of the failed ones was done.
  driver().call(count, &calls, stream);
  driver().wait(stream);
  EXPECT_EQ(calls, 1);
}

TEST_F(InjectedErrorTest, FailingContextIsAnError) {
  std::thread([&] {
    kTestCuda.fail_next("cuCtxSetCurrent", 201);
    EXPECT_THAT(error_of([&] { driver().pin(10); }).what(), HasSubstr("CUDA_ERROR_INVALID_CONTEXT"));
  }).join();
}

TEST_F(InjectedErrorTest, WrongMemoryIsAnError) {
  const TestStream stream;
  const DeviceArray<char> device(64);
  const PinnedBuffer host(128);
  EXPECT_THAT(error_of([&] { driver().copy(host.data(), device.data(), 65, stream); }).what(),
              HasSubstr("CUDA_ERROR_INVALID_VALUE"));
  EXPECT_THAT(error_of([&] { driver().wait(reinterpret_cast<CudaStream>(0x123450)); }).what(),
              HasSubstr("CUDA_ERROR_INVALID_HANDLE"));
}

TEST_F(InjectedErrorTest, OperationThatFailsBreaksAllLaterCalls) {
  const TestStream stream;
  const DeviceArray<char> device(64);
  void* const memory = driver().pin(64);
  Gate gate;
  driver().call(Gate::hold, &gate, stream);
  driver().copy(memory, device.data(), 64, stream);
  driver().unpin(memory);
  gate.open = true;
  EXPECT_THAT(error_of([&] { driver().wait(stream); }).what(), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS"));
  EXPECT_THAT(error_of([&] { driver().pin(64); }).what(), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS"));
}

TEST_F(InjectedErrorTest, HostFunctionsMustNotCallCuda) {
  const TestStream stream;
  std::string message;
  driver().call(
      [](void* argument) noexcept {
        *static_cast<std::string*>(argument) = error_of([] { cuda_driver()->pin(10); }).what();
      },
      &message, stream);
  driver().wait(stream);
  EXPECT_THAT(message, HasSubstr("CUDA_ERROR_NOT_PERMITTED"));
}

TEST_F(InjectedErrorTest, HostCannotTouchDeviceMemory) {
  const DeviceArray<int> device(4);
  // Through the kernel, which says so where a plain access would end the program.
  std::array<int, 2> ends;
  ASSERT_EQ(::pipe(ends.data()), 0);
  EXPECT_EQ(::write(ends[1], device.data(), 16), -1);
  EXPECT_EQ(errno, EFAULT);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_F(InjectedErrorTest, UnpinReportsInsteadOfThrowing) {
  std::string lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines += line; });
  void* const memory = driver().pin(64);
  kTestCuda.fail_next("cuMemFreeHost", 4);  // the end of the process
  driver().unpin(memory);
  EXPECT_EQ(lines, "");
  kTestCuda.fail_next("cuMemFreeHost", 1);
  driver().unpin(memory);
  set_log_sink({});
  EXPECT_EQ(lines, "CUDA cannot free locked memory: CUDA_ERROR_INVALID_VALUE (invalid argument)");
  driver().unpin(memory);
  driver().unpin(nullptr);
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
  // 100 B for each copy and call would be 2 MB.
  EXPECT_LT(own_memory(), before + 1'000'000);
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

// What a process of its own finds; "status line|exit status".
std::string probe(const std::string& environment) {
  const std::string command = "env -u KT_TEST_CUDA_FAIL " + environment + " " KT_CUDA_PROBE;
  FILE* const pipe = ::popen(command.c_str(), "r");
  if (!pipe) return "no pipe";
  std::array<char, 1000> line = {};
  std::string words = std::fgets(line.data(), line.size(), pipe) ? line.data() : "";
  if (words.ends_with('\n')) words.pop_back();
  return words + "|" + std::to_string(WEXITSTATUS(::pclose(pipe)));
}

std::string folder_of(const char* library) {
  return "LD_LIBRARY_PATH=" + std::filesystem::path(library).parent_path().string();
}

TEST(CudaAbsenceTest, NoLibrary) {
  const std::string found = probe("-u LD_LIBRARY_PATH");
  if (!found.starts_with("libcuda.so.1")) GTEST_SKIP() << "this machine has a CUDA driver: " << found;
  EXPECT_EQ(found, "libcuda.so.1 was not found|1");
}

TEST(CudaAbsenceTest, LibraryByPath) {
  EXPECT_EQ(probe(folder_of(KT_TEST_CUDA_LIBRARY)), "CUDA 13.1, 1 device|0");
}

TEST(CudaAbsenceTest, LibraryThatLacksSomething) {
  EXPECT_THAT(probe(folder_of(KT_OLD_CUDA_LIBRARY)),
              AllOf(StartsWith("libcuda.so.1 lacks cuGetErrorName, "), HasSubstr(" cuMemcpyAsync, "),
                    EndsWith(", cuMemFreeHost: the driver is too old|1")));
}

TEST(CudaAbsenceTest, LibraryThatDoesNotStart) {
  const std::string folder = folder_of(KT_TEST_CUDA_LIBRARY) + " KT_TEST_CUDA_FAIL=";
  EXPECT_EQ(probe(folder + "cuInit=100"),
            "no CUDA device: CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)|1");
  EXPECT_EQ(
      probe(folder + "cuInit=3"),
      "cuInit: CUDA_ERROR_NOT_INITIALIZED (initialization error); a process forked from one that uses CUDA "
      "cannot use it|1");
  EXPECT_EQ(probe(folder + "cuInit=4242"), "cuInit: CUDA error 4242|1");
  EXPECT_THAT(probe(folder + "cuDeviceGetCount=1"), HasSubstr("CUDA_ERROR_INVALID_VALUE"));
}

}  // namespace
}  // namespace kt
