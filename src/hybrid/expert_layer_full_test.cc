// A stream that takes no more: calls that enqueue wait in the driver, and nobody else may wait for them. On
// the test driver, whose streams can be made that short.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <future>
#include <thread>

#include "hybrid/testing/device_batch.h"

namespace kt::inline hybrid {
namespace {

using namespace std::chrono_literals;

class FullStream : public ::testing::Test {
 protected:
  void SetUp() override {
    if (TestCuda::real()) GTEST_SKIP() << "a real driver takes as much as it does";
    release_all_buffers();
    kTestCuda.limit(6);
  }
  void TearDown() override {
    if (TestCuda::real()) return;
    kTestCuda.limit(UINT64_MAX);
    release_all_buffers();
  }

  // Runs `what` while another thread waits in the driver for the CPU, which waits for `what`.
  static void while_submit_waits(const std::function<void()>& what) {
    const auto team = stream_team();
    const auto layer = test_layer(team);
    const TestStream stream;
    const DeviceBatch batch(TestBatch(3));
    bool in_time = false;
    team->submit([&] {
      // For good: a stream that has just begun makes room again.
      for (int i = 0, waited = 0; i < 300'000 && waited < 20; ++i) {
        waited = kTestCuda.waiting() == 0 ? 0 : waited + 1;
        std::this_thread::sleep_for(1ms);
      }
      ASSERT_GT(kTestCuda.waiting(), 0);
      std::promise<void> done;
      std::future<void> future = done.get_future();
      std::thread([&what, done = std::move(done)]() mutable {
        what();
        done.set_value();
      }).detach();  // else it would be waited for, whatever it waits for
      in_time = future.wait_for(5min) == std::future_status::ready;
    });
    for (int i = 0; i < 10; ++i) {
      batch.submit(*layer, stream);
      batch.sync(*layer, stream);
    }
    EXPECT_EQ(batch.result(stream), plain_forward(*layer, batch.host));
    team->sync();
    EXPECT_TRUE(in_time) << "it waited for the thread that waits for the driver";
    if (!in_time) std::this_thread::sleep_for(1s);  // it may go on now, with what is ours
  }
};

TEST_F(FullStream, ALayerEnds) {
  auto layer = test_layer(stream_team(), {.layer = 1});
  while_submit_waits([&] { layer.reset(); });
}

TEST_F(FullStream, ALayerWithWorkInFlightEnds) {
  auto layer = test_layer(stream_team(), {.layer = 1});
  const TestStream other;
  const DeviceBatch batch(TestBatch(2));
  batch.submit(*layer, other);
  while_submit_waits([&] { layer.reset(); });
  stream_team()->sync();
}

TEST_F(FullStream, TheProcessForks) {
  int status = -1;
  while_submit_waits([&] {
    const pid_t child = fork();
    if (child == 0) {
      alarm(300);
      _exit(held_buffer_bytes() == 0 ? 0 : 1);
    }
    waitpid(child, &status, 0);
  });
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(FullStream, TheBytesAreAskedFor) {
  size_t bytes = 0;
  while_submit_waits([&] { bytes = held_buffer_bytes(); });
  EXPECT_GT(bytes, 0u);
}

}  // namespace
}  // namespace kt::inline hybrid
