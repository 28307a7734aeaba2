// StreamMark on the test driver, or on a GPU with KT_TEST_REAL_CUDA=1.
#include <gtest/gtest.h>

#include <utility>

#include "cuda/testing/driver_fixture.h"

namespace kt::inline cuda {
namespace {

class StreamMarkTest : public CudaDriverTest {};

TEST_F(StreamMarkTest, IsPassedWithItsStream) {
  const TestStream stream;
  StreamMark mark;
  EXPECT_TRUE(mark.passed());
  StreamGate gate;
  driver().call(&StreamGate::hold, &gate, stream);
  mark.set(stream);
  EXPECT_FALSE(mark.passed());
  gate.open = true;
  stream.wait();
  EXPECT_TRUE(mark.passed());
}

TEST_F(StreamMarkTest, HoldsAnotherStream) {
  const TestStream first, second;
  StreamGate gate;
  std::atomic<int> calls = 0;
  StreamMark mark;
  driver().call(&StreamGate::hold, &gate, first);
  mark.set(first);
  mark.hold(second);
  driver().call(count, &calls, second);
  gate.wait();
  EXPECT_EQ(calls, 0);
  // What was held waits for the place that the mark had then.
  mark.set(second);
  mark = StreamMark();
  EXPECT_EQ(calls, 0);
  gate.open = true;
  second.wait();
  EXPECT_EQ(calls, 1);
}

// Marks of eager work are made, asked and ended while any thread captures, and spoil no capture.
TEST_F(StreamMarkTest, WorksBesideCaptures) {
  const TestStream captured, stream;
  std::atomic<int> calls = 0;
  const TestGraph graph(captured, [&] {
    const auto use = [&] {
      StreamMark mark;
      mark.set(stream);
      while (!mark.passed()) std::this_thread::yield();
      mark.hold(stream);
    };
    use();
    std::thread(use).join();
    driver().call(count, &calls, captured);
  });
  graph.launch(captured);
  captured.wait();
  EXPECT_EQ(calls, 1);
}

TEST_F(StreamMarkTest, OrdersStreamsOfACapture) {
  const TestStream main, side;
  const TestEvent fork;
  std::atomic<int> calls = 0;
  StreamMark mark;
  const TestGraph graph(main, [&] {
    fork.record(main);
    fork.hold(side);
    driver().call(count, &calls, side);
    mark.set(side);
    mark.hold(main);
    driver().call(count, &calls, main);
  });
  for (int i = 0; i < 3; ++i) graph.launch(main);
  main.wait();
  EXPECT_EQ(calls, 6);
}

TEST_F(StreamMarkTest, ErrorsSayWhatWasAsked) {
  if (TestCuda::real()) GTEST_SKIP() << "a real driver does not fail on demand";
  const TestStream stream;
  StreamMark mark;
  for (const auto& [entry, message] : {std::pair{"cuEventCreate", "CUDA cannot make an event: "},
                                       {"cuEventRecord", "CUDA cannot record an event in a stream: "}}) {
    kTestCuda.fail_next(entry, 1);
    EXPECT_EQ(std::string(error_of([&] { mark.set(stream); }).what()),
              std::string(message) + "CUDA_ERROR_INVALID_VALUE (invalid argument)");
  }
  mark.set(stream);
  kTestCuda.fail_next("cuEventQuery", 1);
  EXPECT_EQ(error_of([&] { mark.passed(); }).kind(), ErrorKind::kInternal);
  kTestCuda.fail_next("cuStreamWaitEvent", 1);
  EXPECT_EQ(error_of([&] { mark.hold(stream); }).kind(), ErrorKind::kInternal);
}

}  // namespace
}  // namespace kt::inline cuda
