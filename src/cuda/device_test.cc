// A GPU of our own: what it is said to be, and what is left of it in a forked child. Kernels are tested in nn/.
#include "cuda/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "cuda/driver.h"
#include "cuda/testing/test_cuda.h"

namespace kt::inline cuda {
namespace {

using testing::HasSubstr;

// A variable of the test driver, while it lives.
class Pretend {
 public:
  Pretend(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Pretend() { ::unsetenv(name_); }
  Pretend(const Pretend&) = delete;
  Pretend& operator=(const Pretend&) = delete;

 private:
  const char* name_;
};

std::string refusal() {
  try {
    const Gpu gpu(0);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    return error.what();
  }
  return "";
}

class DeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    if (TestCuda::real()) GTEST_SKIP() << "a real GPU is what it is";
  }
};

TEST_F(DeviceTest, ASliceIsAGpuOfItsOwnSize) {
  const Gpu whole(0);
  const Pretend slice("KT_TEST_CUDA_MIG", "1");
  const Gpu gpu(0);
  EXPECT_EQ(gpu.facts().describe(), "GPU 0 (test driver MIG 1g.1gb)");
  EXPECT_LT(gpu.facts().multiprocessors, whole.facts().multiprocessors);
  EXPECT_EQ(gpu.facts().memory, uint64_t{1} << 30);
  EXPECT_LE(gpu.free_memory(), gpu.facts().memory);
  EXPECT_THROW(DeviceBuffer(std::make_shared<const Gpu>(0), size_t{2} << 30, "too much"), Error);
}

TEST_F(DeviceTest, AScreenIsSeen) {
  EXPECT_FALSE(Gpu(0).facts().shows_screen);
  const Pretend screen("KT_TEST_CUDA_SCREEN", "1");
  EXPECT_TRUE(Gpu(0).facts().shows_screen);
}

TEST_F(DeviceTest, WhatIsNeededAndWhatWasFound) {
  {
    const Pretend old("KT_TEST_CUDA_VERSION", "11080");
    EXPECT_EQ(refusal(), "GPU 0: the driver speaks CUDA 11.8, needed is 12.0 (driver 525 or newer)");
  }
  const Pretend old("KT_TEST_CUDA_CAPABILITY", "75");
  EXPECT_THAT(refusal(), HasSubstr("compute capability 7.5, needed is 8.0 or newer"));
}

TEST_F(DeviceTest, AForkedChildGetsErrorsAndGivesNothingBack) {
  const auto gpu = std::make_shared<const Gpu>(0);
  auto stream = std::make_unique<GpuStream>(gpu);
  auto buffer = std::make_unique<DeviceBuffer>(gpu, 256, "a buffer");
  PinnedBuffer pinned = pinned_for(*gpu, 256);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto refused = [&](auto body) {
      try {
        body();
      } catch (const Error& error) {
        const std::string line = error.what();
        return line.find("before fork()") != std::string::npos && line.find("GPU 0 (") != std::string::npos;
      }
      return false;
    };
    int wrong = 0;
    bool said = false;
    set_log_sink([&](LogLevel, std::string_view) { said = true; });
    if (!refused([&] { stream->copy(buffer->at(), pinned.data(), 256); })) wrong |= 1;
    if (!refused([&] { stream->wait(); })) wrong |= 2;
    if (!refused([&] { stream->done(); })) wrong |= 4;
    if (!refused([&] { DeviceBuffer(gpu, 16, "another"); })) wrong |= 8;
    if (!refused([&] { pinned_for(*gpu, 16); })) wrong |= 16;
    if (!refused([&] { gpu->free_memory(); })) wrong |= 32;
    stream.reset();
    buffer.reset();
    {
      const PinnedBuffer given_back = std::move(pinned);
    }
    ::_exit(wrong | (said ? 64 : 0));
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  stream->copy(buffer->at(), pinned.data(), 256);
  stream->wait();
}

}  // namespace
}  // namespace kt::inline cuda
