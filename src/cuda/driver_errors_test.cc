// What the driver says when something is wrong, and where there is none. Also that the test driver forbids
// what CUDA forbids.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>

#include "base/log.h"
#include "cuda/testing/driver_fixture.h"

namespace kt::inline cuda {
namespace {

using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

// What cannot be brought about on the machine's driver, or must not.
class InjectedErrorTest : public CudaDriverTest {
 protected:
  void SetUp() override {
    if (TestCuda::real()) GTEST_SKIP() << "errors cannot be injected into the machine's driver";
    CudaDriverTest::SetUp();
  }
};

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

TEST_F(InjectedErrorTest, ARefusedEndOfAGraphIsAnError) {
  const TestStream stream;
  std::atomic<int> ended = 0;
  for (const char* const name :
       {"cuStreamGetCaptureInfo_v2", "cuUserObjectCreate", "cuGraphRetainUserObject"}) {
    const TestGraph graph(stream, [&] {
      kTestCuda.fail_next(name, 1);
      EXPECT_THAT(error_of([&] { driver().at_end_of_graph(count, &ended, stream); }).what(),
                  HasSubstr("CUDA_ERROR_INVALID_VALUE"))
          << name;
    });
  }
  EXPECT_EQ(ended, 0);
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
  StreamGate gate;
  driver().call(StreamGate::hold, &gate, stream);
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

// What a process of its own finds; "status line|exit status".
std::string probe(const std::string& environment) {
  const std::string command = "env -u KT_TEST_CUDA_FAIL " + environment + " " KT_CUDA_PROBE;
  FILE* const pipe = ::popen(command.c_str(), "r");
  if (!pipe) return "no pipe";
  std::array<char, 1000> line = {};
  std::string answer = std::fgets(line.data(), line.size(), pipe) ? line.data() : "";
  if (answer.ends_with('\n')) answer.pop_back();
  return answer + "|" + std::to_string(WEXITSTATUS(::pclose(pipe)));
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
                    EndsWith(", cuLaunchKernel: the driver is too old|1")));
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
}  // namespace kt::inline cuda
