// On the test driver, or on a GPU with KT_TEST_REAL_CUDA=1.
#include "hybrid/stream_slots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "hybrid/testing/device_batch.h"

namespace kt::inline hybrid {
namespace {

using ::testing::HasSubstr;

constexpr size_t kSlot = StreamSlots::kSmallest;

void set_true(void* flag) noexcept { *static_cast<std::atomic<bool>*>(flag) = true; }

// A use of a slot whose end is in the stream.
StreamSlot& use(StreamSlots& slots, CudaStream stream, size_t bytes = kSlot) {
  StreamSlot& slot = slots.take(bytes, stream);
  slots.mark(slot, stream);
  return slot;
}

TEST(StreamSlots, StreamsThatTakeTurnsShareOne) {
  StreamSlots slots(StreamSlots::Kind::kEager);
  const std::array<TestStream, 8> streams;
  for (int round = 0; round < 3; ++round)
    for (const TestStream& stream : streams) {
      use(slots, stream, 1 + static_cast<size_t>(round) * 100);
      stream.wait();
    }
  EXPECT_EQ(slots.bytes(), kSlot);
}

TEST(StreamSlots, AStreamUsesItsSlotAgainBeforeItHasPassedIt) {
  StreamSlots slots(StreamSlots::Kind::kEager);
  const TestStream stream;
  Gate gate(stream);
  StreamSlot& first = use(slots, stream);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(&use(slots, stream), &first);
  gate.open();
}

TEST(StreamSlots, AnotherStreamGetsItOnlyWhenItIsPassed) {
  StreamSlots slots(StreamSlots::Kind::kEager);
  const TestStream held, other;
  Gate gate(held);
  StreamSlot& first = use(slots, held);
  StreamSlot& second = use(slots, other);
  EXPECT_NE(&first, &second);
  gate.open();
  held.wait();
  other.wait();
  EXPECT_EQ(slots.count(), 2u);
  use(slots, other);
  use(slots, held);
  EXPECT_EQ(slots.count(), 2u);
}

// Grows with what is in flight up to its bound, then a stream waits for the oldest that is in flight.
TEST(StreamSlots, IsBounded) {
  StreamSlots slots(StreamSlots::Kind::kEager, 4 * kSlot);
  const std::array<TestStream, 5> streams;
  std::vector<std::unique_ptr<Gate>> gates;
  for (size_t i = 0; i < 4; ++i) {
    gates.push_back(std::make_unique<Gate>(streams[i]));
    use(slots, streams[i]);
  }
  EXPECT_EQ(slots.bytes(), 4 * kSlot);
  std::atomic<bool> ran = false;
  use(slots, streams[4]);
  cuda_driver()->call(set_true, &ran, streams[4]);
  EXPECT_EQ(slots.bytes(), 4 * kSlot);
  // Their ends are not waited for: a driver may run the host functions of all streams on one thread, which
  // the oldest gate still holds.
  for (size_t i = 4; i-- > 1;) gates[i]->open();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(ran) << "the oldest is still held";
  gates[0]->open();
  streams[4].wait();
  EXPECT_TRUE(ran);
}

// A call that is open cannot be waited for: whoever submitted it may want this one first.
TEST(StreamSlots, GrowsBeyondTheBoundWhereAllAreOpen) {
  StreamSlots slots(StreamSlots::Kind::kEager, kSlot);
  const TestStream stream;
  for (int i = 0; i < 5; ++i) slots.take(kSlot, stream);
  EXPECT_EQ(slots.bytes(), 5 * kSlot);
}

// Large ones come on top of the bound, two of a size; what is too small stays.
TEST(StreamSlots, TakingFreesNothing) {
  StreamSlots slots(StreamSlots::Kind::kEager, 4 * kSlot);
  const std::array<TestStream, 4> streams;
  const int freed = kTestCuda.calls("cuMemFreeHost");
  const auto hold_all = [&](size_t bytes) {
    std::vector<std::unique_ptr<Gate>> gates;
    for (const TestStream& stream : streams) {
      gates.push_back(std::make_unique<Gate>(stream));
      use(slots, stream, bytes);
    }
    for (const auto& gate : gates) gate->open();
    for (const TestStream& stream : streams) stream.wait();
  };
  hold_all(kSlot);
  EXPECT_EQ(slots.bytes(), 4 * kSlot);
  hold_all(4 * kSlot);
  EXPECT_EQ(slots.bytes(), (4 + 2 * 4) * kSlot) << "two, and the other streams wait";
  hold_all(1);
  EXPECT_EQ(slots.bytes(), (4 + 2 * 4) * kSlot) << "large ones serve small calls";
  EXPECT_EQ(kTestCuda.calls("cuMemFreeHost"), freed);
  slots.give_back();
  EXPECT_EQ(slots.bytes(), 0u);
}

TEST(StreamSlots, GivesBackWhatIsNotInUse) {
  StreamSlots slots(StreamSlots::Kind::kEager);
  const TestStream stream, held;
  Gate gate(held);
  use(slots, held);
  use(slots, stream);
  StreamSlot& open = slots.take(kSlot, stream);
  stream.wait();
  slots.give_back();
  EXPECT_EQ(slots.count(), 2u) << "one is open, one held";
  gate.open();
  held.wait();
  StreamSlots::free(open);
  slots.give_back();
  EXPECT_EQ(slots.count(), 0u);
}

TEST(StreamSlots, ALostEndLosesTheSlot) {
  if (TestCuda::real()) GTEST_SKIP() << "a real driver does not fail on demand";
  StreamSlots slots(StreamSlots::Kind::kEager);
  const TestStream stream;
  StreamSlot& slot = slots.take(kSlot, stream);
  kTestCuda.fail_next("cuEventRecord", 1);
  slots.mark(slot, stream);
  kTestCuda.mend();
  EXPECT_NE(&slots.take(kSlot, stream), &slot);
}

TEST(StreamSlots, LostOnesAreBounded) {
  if (TestCuda::real()) GTEST_SKIP() << "a real driver does not fail on demand";
  StreamSlots slots(StreamSlots::Kind::kEager);
  const TestStream stream;
  for (size_t i = 0; i < StreamSlots::kMostLost; ++i) {
    StreamSlot& slot = slots.take(kSlot, stream);
    kTestCuda.fail_next("cuEventRecord", 1);
    slots.mark(slot, stream);
  }
  kTestCuda.mend();
  EXPECT_THAT(error_of([&] { slots.take(kSlot, stream); }), HasSubstr("16 uses of locked memory"));
  EXPECT_EQ(slots.bytes(), StreamSlots::kMostLost * kSlot);
  stream.wait();
  slots.give_back();
  EXPECT_EQ(slots.bytes(), 0u);
  use(slots, stream);
}

TEST(StreamSlots, StreamsOfACaptureShareAFew) {
  StreamSlots slots(StreamSlots::Kind::kCaptured);
  const TestStream main;
  const std::array<TestStream, 12> side;
  const std::array<TestEvent, 24> events;
  const TestGraph graph(main, [&] {
    for (size_t i = 0; i < side.size(); ++i) {
      events[2 * i].record(main);
      events[2 * i].hold(side[i]);
      use(slots, side[i]);
      events[2 * i + 1].record(side[i]);
      events[2 * i + 1].hold(main);
    }
  });
  EXPECT_EQ(slots.bytes(), StreamSlots::kOwnSlots * kSlot);
  graph.launch(main);
  main.wait();
  slots.give_back();
  EXPECT_EQ(slots.count(), StreamSlots::kOwnSlots) << "replays come back to them";
}

}  // namespace
}  // namespace kt::inline hybrid
