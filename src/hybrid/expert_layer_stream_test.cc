// On the test driver, which keeps streams and graphs on the CPU, or on a GPU with KT_TEST_REAL_CUDA=1.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "base/error.h"
#include "hybrid/expert_layer.h"
#include "hybrid/testing/device_batch.h"

namespace kt::inline hybrid {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

class ExpertLayerStream : public ::testing::Test {
 protected:
  void SetUp() override { cuda_driver()->posts(); }  // loads what it needs, which a gate would hold up
  void TearDown() override { release_all_buffers(); }
};

TEST_F(ExpertLayerStream, GivesTheBitsOfItsExperts) {
  const auto layer = test_layer(stream_team());
  const TestStream stream;
  for (const int tokens : {1, 7, 64, 2}) {
    const DeviceBatch batch(TestBatch(tokens, static_cast<unsigned>(tokens)));
    EXPECT_EQ(batch.run(*layer, stream), plain_forward(*layer, batch.host));
  }
}

TEST_F(ExpertLayerStream, InputsMayBeOverwrittenByTheStreamAfterSubmit) {
  const auto layer = test_layer(stream_team());
  const TestStream stream;
  const DeviceBatch batch(TestBatch(4));
  const DeviceArray<int64_t> none(std::vector<int64_t>(16, -1));
  Gate gate(stream);
  batch.submit(*layer, stream);
  cuda_driver()->copy(batch.ids.data(), none.data(), 16 * sizeof(int64_t), stream);
  batch.sync(*layer, stream);
  gate.open();
  EXPECT_EQ(batch.result(stream), plain_forward(*layer, batch.host));
}

// The host is far ahead of the stream: slots are shared, results are not mixed up, and the argument blocks of
// work in flight are not used again.
TEST_F(ExpertLayerStream, ManyLayersInFlight) {
  const auto team = stream_team();
  const TestStream stream;
  std::vector<std::unique_ptr<ExpertLayer>> layers;
  std::vector<std::unique_ptr<DeviceBatch>> batches;
  for (int i = 0; i < 4; ++i) layers.push_back(test_layer(team, {.layer = i}));
  Gate gate(stream);
  for (int i = 0; i < 24; ++i) {
    batches.push_back(std::make_unique<DeviceBatch>(TestBatch(1 + i % 5, static_cast<unsigned>(i))));
    batches.back()->submit(*layers[static_cast<size_t>(i % 4)], stream);
    if (i % 2 == 0) continue;  // the sync of a layer follows the next one's submit
    batches[static_cast<size_t>(i - 1)]->sync(*layers[static_cast<size_t>((i - 1) % 4)], stream);
    batches.back()->sync(*layers[static_cast<size_t>(i % 4)], stream);
  }
  gate.open();
  stream.wait();
  for (size_t i = 0; i < batches.size(); ++i)
    EXPECT_EQ(batches[i]->output.read(), plain_forward(*layers[i % 4], batches[i]->host)) << i;
}

TEST_F(ExpertLayerStream, SeveralStreamsAndThreads) {
  const auto team = stream_team();
  const auto layer = test_layer(team), wide = test_layer(team, {.layer = 1, .shape = {4, 128, 32}});
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      ExpertLayer& mine = t == 2 ? *wide : *layer;
      const TestStream stream;
      const DeviceBatch batch(TestBatch(2 + static_cast<int>(t), t, mine.options().shape));
      const std::vector<float> want = plain_forward(mine, batch.host);
      for (int i = 0; i < 30; ++i) EXPECT_EQ(batch.run(mine, stream), want);
    });
  for (std::thread& thread : threads) thread.join();
}

// Handle 2 is a stream of its own in each thread.
TEST_F(ExpertLayerStream, DefaultStreamsOfTwoThreads) {
  auto* const own = reinterpret_cast<CudaStream>(uintptr_t{2});
  const auto layer = test_layer(stream_team());
  const DeviceBatch here(TestBatch(2, 1)), there(TestBatch(3, 2));
  here.submit(*layer, own);
  std::thread([&] {
    kTestCuda.use_device();
    EXPECT_THAT(error_of([&] { here.sync(*layer, own); }), HasSubstr("nothing was submitted on this stream"));
    there.submit(*layer, own);
    there.sync(*layer, own);
    kTestCuda.call("cuStreamSynchronize", own);
  }).join();
  here.sync(*layer, own);
  kTestCuda.call("cuStreamSynchronize", own);
  EXPECT_EQ(here.output.read(), plain_forward(*layer, here.host));
  EXPECT_EQ(there.output.read(), plain_forward(*layer, there.host));
}

TEST_F(ExpertLayerStream, TheNullStreamHasTwoHandles) {
  auto* const legacy = reinterpret_cast<CudaStream>(uintptr_t{1});
  const auto layer = test_layer(stream_team());
  const DeviceBatch batch(TestBatch(2));
  batch.submit(*layer, nullptr);
  batch.sync(*layer, legacy);
  kTestCuda.call("cuStreamSynchronize", legacy);
  EXPECT_EQ(batch.output.read(), plain_forward(*layer, batch.host));
}

TEST_F(ExpertLayerStream, GraphsReadInputsAndMaskAtEachReplay) {
  std::vector<uint8_t> mask(8);  // outlives the layer
  const auto layer = test_layer(stream_team());
  const TestStream stream;
  const DeviceBatch batch(TestBatch(5, 1));
  layer->set_mask(mask.data());
  const TestGraph graph(stream, [&] {
    batch.submit(*layer, stream);
    batch.sync(*layer, stream);
  });
  TestBatch host = batch.host;
  for (unsigned round = 0; round < 6; ++round) {
    host.input = random_values(host.input.size(), 50 + round);
    batch.input.write(host.input);
    mask.assign(8, 0);
    mask[round] = 1;
    graph.launch(stream);
    EXPECT_EQ(batch.result(stream), plain_forward(*layer, host, mask.data())) << round;
  }
}

// Two graphs and eager work between their replays do not share buffers.
TEST_F(ExpertLayerStream, GraphsAndEagerWorkTakeTurns) {
  const auto team = stream_team();
  const auto first = test_layer(team), second = test_layer(team, {.layer = 1});
  const TestStream stream;
  const DeviceBatch a(TestBatch(3, 1)), b(TestBatch(3, 2)), c(TestBatch(8, 3));
  const auto record = [&] {
    a.submit(*first, stream);
    a.sync(*first, stream);
    b.submit(*second, stream);
    b.sync(*second, stream);
  };
  const TestGraph graph(stream, record), again(stream, record);
  for (int i = 0; i < 10; ++i) {
    (i % 2 ? graph : again).launch(stream);
    c.submit(*first, stream);
    c.sync(*first, stream);
  }
  stream.wait();
  EXPECT_EQ(a.output.read(), plain_forward(*first, a.host));
  EXPECT_EQ(b.output.read(), plain_forward(*second, b.host));
  EXPECT_EQ(c.output.read(), plain_forward(*first, c.host));
}

TEST_F(ExpertLayerStream, DefersToTheNextLayer) {
  const TestStream stream;
  for (const int tokens : {1, 6}) {
    const DeferringModel model(tokens);
    {
      Gate gate(stream);
      for (int i = 0; i < 3; ++i) model.enqueue(stream);
      gate.open();
      stream.wait();
    }
    model.expect("eager");
  }
}

TEST_F(ExpertLayerStream, DefersInGraphs) {
  const TestStream stream;
  const DeferringModel model(3);
  const TestGraph graph(stream, [&] { model.enqueue(stream); });
  for (unsigned round = 0; round < 5; ++round) {
    DeviceBatch& batch = *model.batches[1];
    batch.host.input = random_values(batch.host.input.size(), 70 + round);
    batch.input.write(batch.host.input);
    graph.launch(stream);
    stream.wait();
    model.expect("replay");
  }
}

// Engines that give each layer a stream of its own order them by events.
TEST_F(ExpertLayerStream, DefersToALayerOnAnotherStream) {
  const TestStream main, side[4];
  const DeferringModel model(5);
  const TestEvent events[8];
  const auto enqueue = [&] {
    for (size_t i = 0; i < 4; ++i) {
      events[2 * i].record(main);
      events[2 * i].hold(side[i]);
      model.batches[i]->submit(*model.layers[i], side[i]);
      model.batches[i]->sync(*model.layers[i], side[i]);
      events[2 * i + 1].record(side[i]);
      events[2 * i + 1].hold(main);
    }
  };
  for (int i = 0; i < 3; ++i) enqueue();
  main.wait();
  model.expect("eager");
  const TestGraph graph(main, enqueue);
  for (int i = 0; i < 3; ++i) graph.launch(main);
  main.wait();
  model.expect("replay");
}

// Nothing of the graph waits for the CPU, but the copies of the next replay must: the first has a weight that
// is not a number, the second has not, and the first must see its own.
TEST_F(ExpertLayerStream, ACapturedSubmitWithoutASyncIsReplayed) {
  for (const int deferred : {0, 1}) {
    const auto layer = test_layer(stream_team(), {.layer = 3, .max_deferred = deferred});
    const TestStream stream;
    TestBatch host(4);
    const DeviceArray<float> good(host.weights);
    host.weights[2] = std::nanf("");
    const DeviceBatch batch(host);
    const TestGraph graph(stream, [&] { batch.submit(*layer, stream); });
    Signal open;
    layer->team().submit([&] { open.wait(); });
    graph.launch(stream);
    cuda_driver()->copy(batch.weights.data(), good.data(), good.size() * sizeof(float), stream);
    // A driver may keep a launch waiting for those before, and so for the team: not the thread that opens.
    std::atomic<int> launched = 0;
    std::thread replays([&] {
      kTestCuda.use_device();
      for (; launched < 50; ++launched) graph.launch(stream);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::printf("  %d launches of 50 were taken ahead of the team\n", launched.load());
    open.set();
    replays.join();
    stream.wait();
    layer->team().sync();
    EXPECT_THAT(error_of([&] { layer->check(); }), HasSubstr("layer 3: the weight of token 0, slot 2"));
    layer->check();
  }
}

TEST_F(ExpertLayerStream, ALayerThatAlwaysDefersIsReplayed) {
  const auto layer = test_layer(stream_team(), {.max_deferred = 2});
  const TestStream stream;
  const DeviceBatch batch(TestBatch(4));
  std::vector<int64_t> now(batch.host.ids.size()), later(now);
  split_deferred(batch.host.ids, batch.host.weights, 4, 2, 8, now, later);
  const TestGraph graph(stream, [&] {
    batch.submit(*layer, stream);
    batch.sync(*layer, stream);
  });
  for (int i = 0; i < 50; ++i) graph.launch(stream);
  EXPECT_EQ(batch.result(stream), plain_forward(*layer, batch.host, now));
}

TEST_F(ExpertLayerStream, ErrorsAreZerosAndThrownLater) {
  const auto layer = test_layer(stream_team(), {.layer = 2}), other = test_layer(stream_team(), {.layer = 3});
  const TestStream stream;
  const TestBatch good(3);
  TestBatch bad = good;
  bad.weights[5] = std::nanf("");
  const DeviceBatch wrong(bad), right(good);
  wrong.output.write(std::vector<float>(bad.input.size(), 5.0f));
  Gate gate(stream);
  wrong.submit(*layer, stream);
  wrong.sync(*layer, stream);
  gate.open();
  EXPECT_THAT(wrong.result(stream), Each(0.0f));
  EXPECT_EQ(right.run(*other, stream), plain_forward(*other, good)) << "another layer goes on";
  EXPECT_THAT(error_of([&] { right.submit(*layer, stream); }),
              HasSubstr("layer 2: the weight of token 1, slot 1"));
  layer->check();
  EXPECT_EQ(right.run(*layer, stream), plain_forward(*layer, good));
}

TEST_F(ExpertLayerStream, RefusesWhatIsWrongWithACall) {
  const auto layer = test_layer(stream_team(), {.layer = 2, .max_tokens = 4});
  const TestStream stream, other;
  const DeviceBatch many(TestBatch(5)), batch(TestBatch(2));
  EXPECT_EQ(error_of([&] { many.submit(*layer, stream); }), "layer 2: 5 tokens, expected at most 4");
  EXPECT_THAT(error_of([&] { batch.sync(*layer, stream); }), HasSubstr("layer 2: nothing was submitted"));
  LayerCall call = batch.call();
  call.input_stride = 70;
  EXPECT_THAT(error_of([&] { layer->submit(call, stream); }), HasSubstr("70 apart"));
  call.tokens = 0;
  call.input_stride = 0;
  layer->submit(call, stream);
  layer->sync(nullptr, 0, stream);
  batch.submit(*layer, stream);
  EXPECT_THAT(error_of([&] { batch.sync(*layer, other); }),
              HasSubstr("nothing was submitted on this stream"));
  EXPECT_THAT(error_of([&] { layer->sync(batch.output.data(), 1, stream); }),
              HasSubstr("2 tokens were submitted, the result of 1"));
  EXPECT_THAT(error_of([&] { layer->sync(nullptr, 2, stream); }), HasSubstr("null address for the output"));
  batch.sync(*layer, stream);
  EXPECT_EQ(batch.result(stream), plain_forward(*layer, batch.host));
}

TEST_F(ExpertLayerStream, ASecondSubmitGivesUpTheFirst) {
  const auto layer = test_layer(stream_team());
  const TestStream stream;
  const DeviceBatch first(TestBatch(2, 1)), second(TestBatch(3, 2));
  for (int i = 0; i < 20; ++i) {
    first.submit(*layer, stream);
    EXPECT_EQ(second.run(*layer, stream), plain_forward(*layer, second.host));
  }
}

TEST_F(ExpertLayerStream, AFailedCopyLeavesNothingBehind) {
  if (TestCuda::real()) GTEST_SKIP() << "a real driver does not fail on demand";
  const auto layer = test_layer(stream_team());
  const TestStream stream;
  const DeviceBatch batch(TestBatch(2));
  for (const auto& [entry, skip] : calls_of_a_submit()) {
    kTestCuda.fail_next(entry, 1, skip);
    EXPECT_THROW(batch.submit(*layer, stream), Error);
    kTestCuda.mend();
    EXPECT_EQ(batch.run(*layer, stream), plain_forward(*layer, batch.host));
  }
}

// One stream, small calls posted and large ones copied, results in places that only one of them takes.
TEST_F(ExpertLayerStream, SmallAndLargeCallsTakeTurns) {
  const ExpertsShape shape{4, 2048, 32};
  const auto layer = test_layer(stream_team(), {.shape = shape});
  const TestStream stream;
  const DeviceBatch small(TestBatch(2, 1, shape)), large(TestBatch(64, 2, shape));
  const DeviceArray<float> odd(small.output.size() + 1);
  const std::vector<float> want = plain_forward(*layer, small.host),
                           want_large = plain_forward(*layer, large.host);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(small.run(*layer, stream), want);
    EXPECT_EQ(large.run(*layer, stream), want_large);
    small.submit(*layer, stream);
    layer->sync(odd.data() + 1, small.host.tokens, stream);
    stream.wait();
    const std::vector<float> found = odd.read();
    EXPECT_EQ(std::vector(found.begin() + 1, found.end()), want);
  }
}

// More teams than a context has rings, at once and after each other.
TEST_F(ExpertLayerStream, ManyTeams) {
  const TestStream stream;
  const DeviceBatch batch(TestBatch(2, 1));
  std::vector<float> want;
  for (int round = 0; round < 3; ++round) {
    std::vector<std::unique_ptr<ExpertLayer>> layers;
    for (int i = 0; i < 18; ++i) {
      layers.push_back(test_layer(std::make_shared<CpuTeam>(CpuTeamOptions{.threads = 1})));
      if (want.empty()) want = plain_forward(*layers.back(), batch.host);
      EXPECT_EQ(batch.run(*layers.back(), stream), want) << round << " " << i;
    }
    for (const auto& layer : layers) EXPECT_EQ(batch.run(*layer, stream), want);
  }
}

// The team's thread sleeps meanwhile, and nobody but the GPU wakes it.
TEST_F(ExpertLayerStream, GraphsAreReplayedAfterAPause) {
  const auto layer = test_layer(stream_team());
  const TestStream stream;
  const DeviceBatch batch(TestBatch(3, 1));
  const std::vector<float> want = plain_forward(*layer, batch.host);
  const TestGraph graph(stream, [&] {
    batch.submit(*layer, stream);
    batch.sync(*layer, stream);
  });
  for (const int pause : {0, 5, 100, 2500}) {
    std::this_thread::sleep_for(std::chrono::milliseconds(pause));
    graph.launch(stream);
    EXPECT_EQ(batch.result(stream), want) << pause;
  }
}

// Work in flight and captured graphs outlive the layer, with the mask as it was.
TEST_F(ExpertLayerStream, TheLayerMayEndBeforeItsWork) {
  auto layer = test_layer(stream_team());
  const TestStream stream;
  const DeviceBatch batch(TestBatch(3, 1)), captured(TestBatch(3, 2));
  auto mask = std::make_unique<std::vector<uint8_t>>(8);
  mask->at(static_cast<size_t>(batch.host.ids[0])) = 1;
  layer->set_mask(mask->data());
  const std::vector<float> want = plain_forward(*layer, batch.host, mask->data()),
                           want_captured = plain_forward(*layer, captured.host, mask->data());
  const TestGraph graph(stream, [&] {
    captured.submit(*layer, stream);
    captured.sync(*layer, stream);
  });
  Gate gate(stream);
  batch.submit(*layer, stream);
  batch.sync(*layer, stream);
  layer.reset();
  mask.reset();
  gate.open();
  EXPECT_EQ(batch.result(stream), want);
  graph.launch(stream);
  EXPECT_EQ(captured.result(stream), want_captured);
}

TEST_F(ExpertLayerStream, TeamsEndWithTheirLayersAndGraphs) {
  auto team = std::make_shared<CpuTeam>(CpuTeamOptions{.threads = 1});
  const std::weak_ptr<CpuTeam> watch = team;
  const TestStream stream;
  const DeviceBatch batch(TestBatch(2));
  auto layer = test_layer(team), other = test_layer(team, {.layer = 1});
  team.reset();
  batch.run(*layer, stream);
  {
    const TestGraph graph(stream, [&] {
      batch.submit(*other, stream);
      batch.sync(*other, stream);
    });
    graph.launch(stream);
    stream.wait();
  }
  layer.reset();
  other.reset();
  EXPECT_FALSE(watch.expired()) << "a captured graph may be replayed";
  release_all_buffers();
  EXPECT_TRUE(watch.expired());
}

// Whatever is released meanwhile.
TEST_F(ExpertLayerStream, GraphsKeepTheirBuffersWhileTheyLive) {
  const auto layer = test_layer(stream_team());
  const TestStream stream;
  const DeviceBatch batch(TestBatch(3));
  uint64_t number = 0;
  {
    const TestGraph graph(stream, [&] {
      number = cuda_driver()->capture(stream);
      batch.submit(*layer, stream);
      batch.sync(*layer, stream);
    });
    const size_t bytes = held_buffer_bytes();
    for (unsigned round = 0; round < 3; ++round) {
      EXPECT_EQ(release_buffers(), std::vector{number});
      EXPECT_EQ(held_buffer_bytes(), bytes);
      TestBatch host = batch.host;
      host.input = random_values(host.input.size(), 70 + round);
      batch.input.write(host.input);
      graph.launch(stream);
      EXPECT_EQ(batch.result(stream), plain_forward(*layer, host)) << round;
    }
  }
  release_all_buffers();
  EXPECT_EQ(held_buffer_bytes(), 0u);
}

// A capture that another thread's release falls into goes on.
TEST_F(ExpertLayerStream, ReleasesLeaveACaptureUnderWay) {
  const DeferringModel model(3);
  const TestStream stream;
  const TestGraph graph(stream, [&] {
    for (size_t i = 0; i < model.layers.size(); ++i) {
      model.batches[i]->submit(*model.layers[i], stream);
      EXPECT_EQ(release_buffers().size(), 1u);
      model.batches[i]->sync(*model.layers[i], stream);
      EXPECT_EQ(release_buffers().size(), 1u);
    }
  });
  graph.launch(stream);
  stream.wait();
  model.expect("after releases");
}

TEST_F(ExpertLayerStream, PrintsItsHostTime) {
  const auto layer = test_layer(stream_team());
  const TestStream stream;
  const DeviceBatch batch(TestBatch(1));
  double best = 1e9;
  for (int i = 0; i < 300; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    batch.submit(*layer, stream);
    batch.sync(*layer, stream);
    best = std::min(
        best, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    stream.wait();
  }
  std::printf("  submit and sync take %.2f us of the host on this driver\n", best);
}

}  // namespace
}  // namespace kt::inline hybrid
