// Steps that are replayed beside the same launched one by one, and what happens when either side fails in the middle.
// On the test driver, or on a GPU with KT_TEST_REAL_CUDA=1.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <string_view>
#include <thread>

#include "base/error.h"
#include "base/testing/random_values.h"
#include "cuda/testing/test_cuda.h"
#include "nn/gpu_ops.h"

namespace kt::inline nn {
namespace {

constexpr int kRowWidth = 24, kMiddle = 40, kOf = 7, kChosen = 3, kVocabulary = 33, kMostSteps = 5;

struct GraphWatch final : RouteWatch {
  std::vector<int32_t> ids;
  int calls = 0, fails_at = -1;
  std::chrono::nanoseconds takes{}, waited{};
  void chose(size_t, std::span<const int32_t> more) override {
    ids.insert(ids.end(), more.begin(), more.end());
  }
  void on_device(uint64_t, std::chrono::nanoseconds more) override { waited += more; }
  void took(std::chrono::nanoseconds) override {
    if (calls++ == fails_at) fail("an error of the host");
    std::this_thread::sleep_for(takes);
  }
};

Matrix graph_matrix(int64_t n, int64_t k, unsigned seed) {
  return quantise(format_named("f32"), random_values(static_cast<size_t>(n * k), seed), n, k);
}

// Two layers of routed experts and a head, over rows that the caller gives.
struct GraphModel {
  std::unique_ptr<Ops> ops;
  Rows x, normed, out, scores, ids, weights;
  std::unique_ptr<PlacedVector> norm;
  std::unique_ptr<PlacedLinear> router, head;
  std::unique_ptr<PlacedExperts> experts[2];
  std::unique_ptr<SequenceCache> cache;
  RouterSpec spec{.normalise = true};
  GraphWatch watch;

  explicit GraphModel(bool graphs)
      : ops(make_gpu_ops(std::make_shared<Pool>(PoolOptions{.threads = 1, .pin = false}),
                         {.number = 0, .gpu = std::make_shared<Gpu>(0), .graphs = graphs})),
        x(ops->rows("x", kRowWidth)),
        normed(ops->rows("normed", kRowWidth)),
        out(ops->rows("out", kRowWidth)),
        scores(ops->rows("scores", kOf)),
        ids(ops->rows("ids", kChosen)),
        weights(ops->rows("weights", kChosen)),
        norm(ops->make_vector(random_values(kRowWidth, 1))),
        router(ops->make_linear(graph_matrix(kOf, kRowWidth, 2).view(), Precision::kF32, "router")),
        head(ops->make_linear(graph_matrix(kVocabulary, kRowWidth, 3).view(), Precision::kF32, "head")) {
    const Format f32 = format_named("f32");
    for (auto& layer : experts)
      layer = ops->make_experts(
          {.experts = kOf, .hidden = kRowWidth, .inter = kMiddle},
          {.gate = f32, .up = f32, .down = f32, .precision = Precision::kF32, .max_tokens = 16},
          {.name = "experts",
           .experts = kOf,
           .load =
               [&](int e, FunctionRef<void(const ExpertRows&)> use) {
                 const auto seed = static_cast<unsigned>(10 * e);
                 const Matrix gate = graph_matrix(kMiddle, kRowWidth, seed + 4),
                              up = graph_matrix(kMiddle, kRowWidth, seed + 5),
                              down = graph_matrix(kRowWidth, kMiddle, seed + 6);
                 const auto reader = [](const Matrix& of) {
                   return RowReader{.format = of.format,
                                    .n = of.n,
                                    .k = of.k,
                                    .rows = [&of](int64_t first, int64_t count) {
                                      std::vector<float> all(static_cast<size_t>(of.n * of.k));
                                      dequantise(of.view(), all);
                                      return quantise(
                                          of.format,
                                          std::span(all).subspan(static_cast<size_t>(first * of.k),
                                                                 static_cast<size_t>(count * of.k)),
                                          count, of.k);
                                    }};
                 };
                 use({.gate = reader(gate), .up = reader(up), .down = reader(down)});
               }},
          {});
    ops->allocate(8);
    cache = ops->make_cache({.planes = {{.heads = 1, .d = 32, .dv = 32, .type = KvType::kF32}}, .states = {}},
                            8, 0);
  }

  // One token for each of so many sequences; row `bad` is not a number.
  std::vector<float> step(int tokens, unsigned seed, int bad = -1) {
    const int32_t page = 0;
    std::vector<AttentionSequence> sequences;
    std::vector<int32_t> which;
    for (int t = 0; t < tokens; ++t) {
      sequences.push_back({.first = t, .count = 1, .position = t, .pages = &page});
      which.push_back(t);
    }
    std::vector<float> logits(static_cast<size_t>(tokens) * kVocabulary);
    std::vector<float> rows = random_values(static_cast<size_t>(tokens) * kRowWidth, seed);
    if (bad >= 0) rows[static_cast<size_t>(bad) * kRowWidth + 5] = std::numeric_limits<float>::quiet_NaN();
    const RowTable table{.rows = tokens, .width = kRowWidth, .read = [&](int64_t row, float* to) {
                           std::copy_n(rows.begin() + row * kRowWidth, kRowWidth, to);
                         }};
    const StepScope scope(*ops, {.sequences = sequences,
                                 .tokens = tokens,
                                 .cache = cache.get(),
                                 .logits = logits.data(),
                                 .alike = true});
    ops->embed(table, which, x);
    ops->repeat([&] { layers(tokens); });
    return logits;
  }
  void layers(int tokens) {
    for (const auto& layer : experts) run_layer(*layer);
    ops->norm(x, *norm, 1e-5, normed);
    ops->project(*head, normed, tokens, 0);
  }
  void run_layer(const PlacedExperts& layer) {
    const RunExperts run{.experts = &layer,
                         .top_k = kChosen,
                         .x = normed,
                         .ids = ids,
                         .weights = weights,
                         .out = out,
                         .watch = &watch};
    ops->norm(x, *norm, 1e-5, normed);
    ops->route({.spec = &spec,
                .router = router.get(),
                .top_k = kChosen,
                .x = normed,
                .scores = scores,
                .ids = ids,
                .weights = weights});
    ops->send_experts(run);
    ops->experts(run);
    ops->add(x, out);
  }
};

constexpr int kBatches[kMostSteps] = {1, 3, 4, 3, 1};

TEST(GpuGraph, ReplaysGiveTheBitsOfLaunches) {
  const int before = kTestCuda.calls("cuGraphLaunch");
  GraphModel replayed(true), launched(false);
  for (int i = 0; i < kMostSteps; ++i) {
    const auto seed = static_cast<unsigned>(i);
    EXPECT_EQ(replayed.step(kBatches[i], seed), launched.step(kBatches[i], seed)) << "step " << i;
  }
  EXPECT_EQ(replayed.watch.ids, launched.watch.ids);
  EXPECT_EQ(replayed.watch.ids.size(), 2u * kChosen * (1 + 3 + 4 + 3 + 1));
  EXPECT_EQ(replayed.watch.calls, 2 * kMostSteps);
  if (!kTestCuda.real()) {
    EXPECT_EQ(kTestCuda.calls("cuGraphLaunch") - before, kMostSteps);
  }
}

TEST(GpuGraph, WorkIsCountedAtEachReplay) {
  GraphModel replayed(true), launched(false);
  for (GraphModel* model : {&replayed, &launched})
    for (unsigned i = 0; i < 3; ++i) model->step(2, i);
  for (const Place place : {kHost, replayed.ops->place()}) {
    Work ours = replayed.ops->work(), theirs = launched.ops->work();
    EXPECT_GT(ours.at(place).bytes, 0);
    EXPECT_EQ(ours.at(place).bytes, theirs.at(place).bytes);
  }
}

// Replayed, the kernels that wait for the host are let go; launched one by one, none waits yet.
TEST(GpuGraph, AnErrorOfTheHostEndsTheStepAlone) {
  GraphModel other(true);
  for (const bool graphs : {true, false}) {
    GraphModel model(graphs);
    model.step(2, 0);
    for (const int layer : {0, 1}) {
      model.watch.calls = 0;
      model.watch.fails_at = layer;
      EXPECT_THROW(model.step(2, 1), Error);
      model.watch.fails_at = -1;
      EXPECT_EQ(model.step(2, 2), other.step(2, 2)) << "graphs " << graphs << ", layer " << layer;
    }
  }
}

// The first step of its size: the graph is being noted down, or has been, when the host's side fails.
TEST(GpuGraph, AnErrorOfTheHostInTheFirstStep) {
  GraphModel model(true), other(true);
  model.watch.fails_at = 0;
  EXPECT_THROW(model.step(3, 1), Error);
  model.watch.fails_at = -1;
  EXPECT_EQ(model.step(3, 2), other.step(3, 2));
}

// One sequence's, and of that step: neither its neighbours' rows nor later steps have any of it.
TEST(GpuGraph, NumbersThatAreNoneStayInTheirRow) {
  for (const bool graphs : {true, false}) {
    GraphModel model(graphs), other(graphs);
    const std::vector<float> good = other.step(3, 1), mixed = model.step(3, 1, 1);
    for (size_t i = 0; i < good.size(); ++i) {
      if (i / kVocabulary == 1)
        EXPECT_TRUE(std::isnan(mixed[i])) << i;
      else
        EXPECT_EQ(mixed[i], good[i]) << i;
    }
    EXPECT_EQ(model.step(3, 2), other.step(3, 2));
  }
}

// Kernels that wait for long are killed there: nothing is replayed, and what needs the host's rows comes after them.
TEST(GpuGraph, AScreenIsSpared) {
  if (kTestCuda.real()) GTEST_SKIP() << "a real GPU shows a screen or does not";
  GraphModel plain(true);
  ::setenv("KT_TEST_CUDA_SCREEN", "1", 1);
  GraphModel spared(true);
  ::unsetenv("KT_TEST_CUDA_SCREEN");
  std::vector<std::vector<float>> expected;
  for (int i = 0; i < kMostSteps; ++i) expected.push_back(plain.step(kBatches[i], static_cast<unsigned>(i)));
  const int before = kTestCuda.calls("cuGraphLaunch");
  for (int i = 0; i < kMostSteps; ++i)
    EXPECT_EQ(spared.step(kBatches[i], static_cast<unsigned>(i)), expected[static_cast<size_t>(i)]);
  EXPECT_EQ(kTestCuda.calls("cuGraphLaunch"), before);
  spared.watch.waited = {};
  spared.watch.takes = std::chrono::milliseconds(200);  // in each of two layers
  spared.step(1, 1);
  spared.step(1, 1);
  EXPECT_LT(spared.watch.waited, std::chrono::milliseconds(100));
}

// Of one row: on the test driver blocks of more run one after the other, and only the first of them waits.
TEST(GpuGraph, TheTimeThatItWaitsForTheHostIsTold) {
  GraphModel model(true);
  model.step(1, 0);
  model.watch.waited = {};
  model.watch.takes = std::chrono::milliseconds(100);  // in each of two layers
  model.step(1, 1);
  EXPECT_GE(model.watch.waited, std::chrono::milliseconds(50));
  EXPECT_LT(model.watch.waited, std::chrono::seconds(100));
}

// On either side.
TEST(GpuGraph, ManyStepsTakeNoMoreMemory) {
  GraphModel model(true);
  const Gpu gpu(0);
  for (int i = 0; i < 2 * kMostSteps; ++i) model.step(kBatches[i % kMostSteps], 1);
  const uint64_t before = gpu.free_memory();
  const int locked = kTestCuda.calls("cuMemHostAlloc");
  const size_t used = ::mallinfo2().uordblks;
  const char* const full = std::getenv("KT_TEST_FULL");
  const int steps = full && std::string_view(full) == "1" ? 10'000 : 500;
  for (int i = 0; i < steps; ++i) model.step(kBatches[i % kMostSteps], 1);
  EXPECT_EQ(gpu.free_memory(), before);
  EXPECT_EQ(kTestCuda.calls("cuMemHostAlloc"), locked);
  EXPECT_LT(::mallinfo2().uordblks, used + (64u << 10)) << steps << " steps";
}

// Every call from the n-th on finds the device lost: an error that names it, and nothing hangs.
TEST(GpuGraph, ALostGpuIsAnErrorAtAnyCall) {
  if (kTestCuda.real()) GTEST_SKIP() << "a real GPU is not lost on demand";
  GraphModel warm(true);  // kernels are loaded once for the process
  for (const int tokens : kBatches) warm.step(tokens, 1);
  int lost = 0;
  for (int calls = 0;; calls += calls < 60 ? 1 : 17) {
    std::string message;
    {
      GraphModel model(true);
      kTestCuda.lose(calls);
      try {
        for (int i = 0; i < 3; ++i) model.step(kBatches[i], 1);
      } catch (const Error& error) {
        message = error.what();
      }
      kTestCuda.mend();
    }
    if (message.empty()) break;
    ++lost;
    EXPECT_THAT(message, testing::HasSubstr("GPU 0 (test driver): CUDA cannot"));
    EXPECT_THAT(message, testing::HasSubstr("CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure)"));
    ASSERT_LT(calls, 10'000);
  }
  EXPECT_GT(lost, 60);
  EXPECT_THAT(lost_gpu().value_or(""), testing::HasSubstr("CUDA_ERROR_LAUNCH_FAILED"));
}

}  // namespace
}  // namespace kt::inline nn
