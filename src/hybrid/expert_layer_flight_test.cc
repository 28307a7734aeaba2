// What calls in streams hold, and for how long. On the test driver, or on a GPU with KT_TEST_REAL_CUDA=1.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "hybrid/stream_slots.h"
#include "hybrid/testing/device_batch.h"

namespace kt::inline hybrid {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

class StreamFlight : public ::testing::Test {
 protected:
  void SetUp() override {
    cuda_driver()->posts();  // loads what it needs, which a gate would hold up
    release_all_buffers();
    ASSERT_EQ(held_buffer_bytes(), 0u);
  }
  void TearDown() override { release_all_buffers(); }
};

// Layers that have a stream each, ordered by events, as some engines do.
struct LayersOnStreams {
  static constexpr size_t kLayers = 12;
  std::vector<std::unique_ptr<ExpertLayer>> layers;
  std::vector<std::unique_ptr<DeviceBatch>> batches;
  TestStream main, side[kLayers];
  TestEvent events[2 * kLayers];

  LayersOnStreams() {
    for (size_t i = 0; i < kLayers; ++i) {
      layers.push_back(test_layer(stream_team(), {.layer = static_cast<int>(i)}));
      batches.push_back(std::make_unique<DeviceBatch>(TestBatch(4, static_cast<unsigned>(i))));
    }
  }
  void enqueue() const {
    for (size_t i = 0; i < kLayers; ++i) {
      events[2 * i].record(main);
      events[2 * i].hold(side[i]);
      batches[i]->submit(*layers[i], side[i]);
      batches[i]->sync(*layers[i], side[i]);
      events[2 * i + 1].record(side[i]);
      events[2 * i + 1].hold(main);
    }
  }
  void expect(const char* what) const {
    main.wait();
    for (size_t i = 0; i < kLayers; ++i)
      EXPECT_EQ(batches[i]->output.read(), plain_forward(*layers[i], batches[i]->host))
          << what << ", layer " << i;
  }
};

TEST_F(StreamFlight, AStreamForEachLayerHoldsWhatIsInFlight) {
  const LayersOnStreams model;
  for (int round = 0; round < 3; ++round)
    for (size_t i = 0; i < LayersOnStreams::kLayers; ++i)
      model.batches[i]->run(*model.layers[i], model.side[i]);
  EXPECT_EQ(held_buffer_bytes(), StreamSlots::kSmallest);
  model.expect("one after the other");
  {
    Gate gate(model.main);
    for (int round = 0; round < 3; ++round) model.enqueue();
    gate.open();
  }
  model.expect("all in flight");
  for (const TestStream& stream : model.side) stream.wait();  // the ends of the slots too
  EXPECT_EQ(held_buffer_bytes(), LayersOnStreams::kLayers * StreamSlots::kSmallest);
  release_all_buffers();
  EXPECT_EQ(held_buffer_bytes(), 0u);
}

TEST_F(StreamFlight, AStreamForEachLayerInACapture) {
  const LayersOnStreams model;
  const TestGraph graph(model.main, [&] { model.enqueue(); });
  const TestGraph again(model.main, [&] { model.enqueue(); });
  EXPECT_EQ(held_buffer_bytes(), 2 * StreamSlots::kOwnSlots * StreamSlots::kSmallest);
  for (unsigned round = 0; round < 4; ++round) {
    for (const auto& batch : model.batches) {
      batch->host.input = random_values(batch->host.input.size(), 300 + round);
      batch->input.write(batch->host.input);
    }
    (round % 2 ? graph : again).launch(model.main);
    model.expect("replay");
    model.enqueue();
    model.expect("eager between replays");
  }
}

// The thread has another context: its events could not be set in the stream, and memory would be lost.
TEST_F(StreamFlight, AStreamOfAnotherContext) {
  const TestContext context;
  const CudaStream stream = context.make_stream();
  const TestStream own;
  const auto layer = test_layer(stream_team());
  const DeviceBatch batch(TestBatch(3));
  for (int i = 0; i < 5; ++i) {
    batch.submit(*layer, stream);
    batch.sync(*layer, stream);
    kTestCuda.call("cuStreamSynchronize", stream);
    EXPECT_EQ(batch.output.read(), plain_forward(*layer, batch.host));
    EXPECT_EQ(batch.run(*layer, own), plain_forward(*layer, batch.host));
  }
  EXPECT_EQ(held_buffer_bytes(), 2 * StreamSlots::kSmallest) << "one for each context";
  {
    const TestGraph graph(stream, [&] {
      batch.submit(*layer, stream);
      batch.sync(*layer, stream);
    });
    graph.launch(stream);
    kTestCuda.call("cuStreamSynchronize", stream);
    EXPECT_EQ(batch.output.read(), plain_forward(*layer, batch.host));
  }
  CudaContext current = nullptr, primary = nullptr;
  kTestCuda.call("cuCtxGetCurrent", &current);
  kTestCuda.call("cuDevicePrimaryCtxRetain", &primary, CudaDevice{0});
  EXPECT_EQ(current, primary) << "the thread's own is current again";
  release_all_buffers();
  EXPECT_EQ(held_buffer_bytes(), 0u);
  kTestCuda.call("cuStreamDestroy_v2", stream);
}

// The copies of the failed call may still be on their way when another stream wants memory.
TEST_F(StreamFlight, AFailedSubmitKeepsItsBufferUntilTheStreamHasPassed) {
  if (TestCuda::real()) GTEST_SKIP() << "a real driver does not fail on demand";
  const auto layer = test_layer(stream_team());
  const TestStream stream, other;
  const DeviceBatch bad(TestBatch(3, 1)), good(TestBatch(3, 2));
  Gate gate(stream);
  for (const auto& [entry, skip] : calls_of_a_submit()) {
    kTestCuda.fail_next(entry, 1, skip);
    EXPECT_THROW(bad.submit(*layer, stream), Error);
    kTestCuda.mend();
    good.submit(*layer, other);
    gate.open();
    stream.wait();
    good.sync(*layer, other);
    EXPECT_EQ(good.result(other), plain_forward(*layer, good.host)) << entry;
  }
  EXPECT_EQ(held_buffer_bytes(), 2 * StreamSlots::kSmallest);
}

TEST_F(StreamFlight, WhatAFailedSubmitWouldDeferIsNotAdded) {
  if (TestCuda::real()) GTEST_SKIP() << "a real driver does not fail on demand";
  const auto first = test_layer(stream_team(), {.layer = 0, .max_deferred = 3}),
             second = test_layer(stream_team(), {.layer = 1});
  const TestStream stream;
  const DeviceBatch a(TestBatch(3, 1)), b(TestBatch(3, 2));
  kTestCuda.fail_next(calls_of_a_submit().back().entry, 1);
  EXPECT_THROW(a.submit(*first, stream), Error);
  kTestCuda.mend();
  EXPECT_EQ(b.run(*second, stream), plain_forward(*second, b.host));
}

// A GPU that fails in the middle of the hand-over has set its word and writes no message: nobody answers it.
TEST_F(StreamFlight, AGraphThatFailedInTheHandOverIsReleased) {
  if (TestCuda::real()) GTEST_SKIP() << "a real context does not come back from that";
  const auto layer = test_layer(stream_team());
  {
    const TestStream stream;
    auto batch = std::make_unique<DeviceBatch>(TestBatch(2));
    const TestGraph graph(stream, [&] { batch->submit(*layer, stream); });
    batch.reset();
    graph.launch(stream);
    EXPECT_NE(kTestCuda.ask("cuStreamSynchronize", static_cast<CudaStream>(stream)), 0);
    kTestCuda.mend();
  }
  release_all_buffers();
  EXPECT_EQ(held_buffer_bytes(), 0u);
}

TEST_F(StreamFlight, AnAbandonedSubmitIsGivenBack) {
  auto team = std::make_shared<CpuTeam>(CpuTeamOptions{.threads = 1});
  const std::weak_ptr<CpuTeam> watch = team;
  const TestStream stream, other;
  const DeviceBatch batch(TestBatch(3));
  for (int i = 0; i < 10; ++i) {
    auto layer = test_layer(team, {.max_deferred = i % 2});
    batch.submit(*layer, i % 3 ? stream : other);
    layer.reset();
    stream.wait();
    other.wait();
    team->sync();
  }
  EXPECT_LE(held_buffer_bytes(), 2 * StreamSlots::kSmallest);
  team.reset();
  release_all_buffers();
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(held_buffer_bytes(), 0u);
}

// Not before the stream has written the input and the team has read it.
TEST_F(StreamFlight, AnAbandonedSubmitKeepsItsBufferWhileItRuns) {
  const auto team = stream_team();
  const TestStream stream, other;
  const DeviceBatch lost(TestBatch(3, 1)), batch(TestBatch(3, 2));
  const auto layer = test_layer(team);
  auto gone = test_layer(team, {.layer = 1});
  Gate gate(stream);
  lost.submit(*gone, stream);
  gone.reset();
  batch.submit(*layer, other);
  EXPECT_EQ(held_buffer_bytes(), 2 * StreamSlots::kSmallest);
  gate.open();
  stream.wait();
  batch.sync(*layer, other);
  EXPECT_EQ(batch.result(other), plain_forward(*layer, batch.host));
  team->sync();
  release_all_buffers();
  EXPECT_EQ(held_buffer_bytes(), 0u);
}

TEST_F(StreamFlight, ModelsThatTakeTurnsLayerByLayerDoNotMix) {
  const TestStream stream;
  const DeferringModel one(3), other(3);
  other.change_inputs(90);
  const auto by_turns = [&] {
    for (size_t i = 0; i < one.layers.size(); ++i)
      for (const DeferringModel* model : {&one, &other}) {
        model->batches[i]->submit(*model->layers[i], stream);
        model->batches[i]->sync(*model->layers[i], stream);
      }
  };
  by_turns();
  stream.wait();
  one.expect("one");
  other.expect("other");
  const TestGraph graph(stream, by_turns);
  for (int i = 0; i < 3; ++i) graph.launch(stream);
  stream.wait();
  one.expect("one, replayed");
  other.expect("other, replayed");
}

// A replay runs no call of the layer, so its error waits for the next one, whichever that is.
TEST_F(StreamFlight, ErrorsOfReplaysAreThrownByTheNextCallOfTheLayer) {
  const auto layer = test_layer(stream_team(), {.layer = 4}), other = test_layer(stream_team(), {.layer = 5});
  const TestStream stream;
  const DeviceBatch captured(TestBatch(2, 1)), batch(TestBatch(2, 2));
  const TestGraph graph(stream, [&] {
    captured.submit(*layer, stream);
    captured.sync(*layer, stream);
  });
  const std::vector<float> good = captured.host.weights;
  std::vector<float> bad = good, out(batch.host.input.size());
  bad[3] = std::nanf("");
  const auto replay_badly = [&] {
    captured.weights.write(bad);
    graph.launch(stream);
    EXPECT_THAT(captured.result(stream), Each(0.0f));
    captured.weights.write(good);
  };
  const auto error = HasSubstr("layer 4: the weight of token 0, slot 3");
  replay_badly();
  batch.run(*other, stream);
  EXPECT_THAT(error_of([&] { layer->forward(batch.host.call(), out.data()); }), error);
  replay_badly();
  EXPECT_THAT(error_of([&] { batch.submit(*layer, stream); }), error);
  replay_badly();
  EXPECT_THAT(error_of([&] { layer->check(); }), error);
  batch.submit(*layer, stream);
  replay_badly();
  EXPECT_THAT(error_of([&] { batch.sync(*layer, stream); }), error);
  EXPECT_EQ(batch.result(stream), plain_forward(*layer, batch.host)) << "its own work was good";
  graph.launch(stream);
  EXPECT_EQ(captured.result(stream), plain_forward(*layer, captured.host));
  layer->check();
}

}  // namespace
}  // namespace kt::inline hybrid
