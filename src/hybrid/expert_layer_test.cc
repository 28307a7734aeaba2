#include "hybrid/expert_layer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "hybrid/testing/test_layer.h"

namespace kt::inline hybrid {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

std::shared_ptr<CpuTeam> small_team(int nodes = 1) { return CpuTeam::shared({.threads = 2, .nodes = nodes}); }

std::vector<float> forward(ExpertLayer& layer, const LayerCall& call) {
  std::vector<float> out(static_cast<size_t>(call.tokens * layer.options().shape.hidden), -9.0f);
  layer.forward(call, out.data());
  return out;
}

TEST(ExpertLayer, GivesTheBitsOfItsExperts) {
  for (const int nodes : {1, 2}) {
    const auto layer = test_layer(small_team(nodes));
    for (const int tokens : {1, 3, 40}) {
      const TestBatch batch(tokens);
      EXPECT_EQ(forward(*layer, batch.call()), plain_forward(*layer, batch));
    }
  }
}

TEST(ExpertLayer, AnswersInTheTypeOfItsInput) {
  const auto layer = test_layer(small_team());
  const TestBatch batch(5);
  const auto check = [&]<typename T>(Real type, T (*narrow)(float)) {
    std::vector<T> in, got(batch.input.size()), want(batch.input.size());
    for (const float x : batch.input) in.push_back(narrow(x));
    LayerCall call = batch.call();
    call.input = in.data();
    call.input_type = type;
    layer->forward(call, got.data());
    layer->experts().forward({.tokens = 5,
                              .top_k = 4,
                              .input = in.data(),
                              .input_type = type,
                              .ids64 = batch.ids.data(),
                              .weights = batch.weights.data(),
                              .output = want.data(),
                              .output_type = type});
    EXPECT_EQ(got, want);
  };
  check(Real::kBf16, +[](float x) { return to_bf16(x); });
  check(Real::kF16, +[](float x) { return to_f16(x); });
}

TEST(ExpertLayer, Takes32BitIdsOtherTopKAndRowsApart) {
  const auto layer = test_layer(small_team());
  const TestBatch batch(6, 11, kTestShape, 3);
  const std::vector<float> want = plain_forward(*layer, batch);
  const std::vector<int32_t> ids(batch.ids.begin(), batch.ids.end());
  LayerCall call = batch.call();
  call.ids = ids.data();
  call.ids_are_64_bit = false;
  EXPECT_EQ(forward(*layer, call), want);

  const int64_t stride = kTestShape.hidden + 5;
  std::vector<float> apart(static_cast<size_t>(6 * stride), std::nanf(""));
  for (int t = 0; t < 6; ++t)
    std::copy_n(batch.input.begin() + t * kTestShape.hidden, kTestShape.hidden, apart.begin() + t * stride);
  call.input = apart.data();
  call.input_stride = stride;
  EXPECT_EQ(forward(*layer, call), want);
}

TEST(ExpertLayer, ReadsTheMaskAtEachForward) {
  const auto layer = test_layer(small_team());
  const TestBatch batch(9);
  std::vector<uint8_t> mask(8);
  layer->set_mask(mask.data());
  EXPECT_EQ(forward(*layer, batch.call()), plain_forward(*layer, batch));
  mask[2] = mask[5] = 1;
  EXPECT_EQ(forward(*layer, batch.call()), plain_forward(*layer, batch, mask.data()));
  EXPECT_NE(forward(*layer, batch.call()), plain_forward(*layer, batch));
  mask.assign(8, 1);
  EXPECT_THAT(forward(*layer, batch.call()), Each(0.0f));
  layer->set_mask(nullptr);
  EXPECT_EQ(forward(*layer, batch.call()), plain_forward(*layer, batch));
}

// The mask may change between the two looks a forward takes at a pair: each result is of one mask or another.
TEST(ExpertLayer, LivesWithAMaskThatChangesAllTheTime) {
  std::vector<uint8_t> mask(8);  // outlives the layer
  const auto layer = test_layer(small_team());
  const TestBatch batch(16);
  layer->set_mask(mask.data());
  std::atomic<bool> stop = false;
  std::thread changes([&] {
    for (unsigned i = 0; !stop; ++i)
      __atomic_store_n(&mask[3], static_cast<uint8_t>(i & 1), __ATOMIC_RELAXED);
  });
  std::vector<uint8_t> off(8), on(8);
  on[3] = 1;
  const std::vector<float> with = plain_forward(*layer, batch, off.data()),
                           without = plain_forward(*layer, batch, on.data());
  for (int i = 0; i < 300; ++i) {
    const std::vector<float> got = forward(*layer, batch.call());
    EXPECT_TRUE(got == with || got == without);
  }
  stop = true;
  changes.join();
}

TEST(ExpertLayer, SkipsIdsThatDoNotExist) {
  const auto layer = test_layer(small_team());
  TestBatch batch(2);
  batch.ids = {-1, 8, 1 << 20, -5, 0, 1, 2, -1};
  batch.weights[1] = std::nanf("");  // of a pair that nobody computes
  const std::vector<float> out = forward(*layer, batch.call());
  EXPECT_THAT(std::vector<float>(out.begin(), out.begin() + 64), Each(0.0f));
  EXPECT_NE(out[64], 0.0f);
}

TEST(ExpertLayer, RefusesWhatIsWrongWithACall) {
  const auto layer = test_layer(small_team(), {.layer = 3, .max_tokens = 10});
  const auto refused = [&](const LayerCall& call) { return error_of([&] { forward(*layer, call); }); };
  const TestBatch many(11);
  EXPECT_EQ(refused(many.call()), "layer 3: 11 tokens, expected at most 10");
  TestBatch batch(2);
  LayerCall call = batch.call();
  call.top_k = 0;
  EXPECT_THAT(refused(call), HasSubstr("layer 3: 0 experts per token"));
  call = batch.call();
  call.ids = nullptr;
  EXPECT_THAT(refused(call), HasSubstr("null address for the ids"));
  EXPECT_THAT(error_of([&] { layer->forward(batch.call(), nullptr); }), HasSubstr("the output"));
  batch.weights[6] = std::nanf("");
  EXPECT_EQ(refused(batch.call()),
            text("layer 3: the weight of token 1, slot 2 (expert {}) is NaN", batch.ids[6]));
  call.tokens = 0;
  layer->forward(call, nullptr);
}

TEST(ExpertLayer, RefusesWhatItCannotBe) {
  const auto made = [](const ExpertLayerOptions& options) {
    return error_of([&] { ExpertLayer(small_team(), options); });
  };
  const ExpertLayerOptions good{.layer = 1, .shape = kTestShape, .top_k = 2, .method = "BF16"};
  EXPECT_EQ(made(good), "no error");
  ExpertLayerOptions bad = good;
  bad.shape.hidden = 0;
  EXPECT_THAT(made(bad), HasSubstr("layer 1: expected positive sizes, got 8 experts, hidden 0"));
  bad = good;
  bad.max_deferred = 3;
  EXPECT_THAT(made(bad), HasSubstr("3 deferred experts per token, expected 0 to 2"));
  bad = good;
  bad.method = "INT3";
  EXPECT_THAT(made(bad), HasSubstr("INT3"));
  EXPECT_THAT(error_of([&] { ExpertLayer(nullptr, good); }), HasSubstr("a team is needed"));
  ExpertLayer empty(small_team(), good);
  const TestBatch batch(1);
  EXPECT_FALSE(empty.loaded());
  EXPECT_THAT(error_of([&] { forward(empty, batch.call()); }), HasSubstr("layer 1: no weights are loaded"));
}

struct Deferring {
  std::unique_ptr<ExpertLayer> first = test_layer(small_team(), {.layer = 0, .max_deferred = 2}),
                               second = test_layer(small_team(), {.layer = 1, .max_deferred = 1}),
                               last = test_layer(small_team(), {.layer = 2});
  std::vector<int64_t> now, later;

  void split(const TestBatch& batch, int deferred) {
    now.resize(batch.ids.size());
    later.resize(batch.ids.size());
    split_deferred(batch.ids, batch.weights, 4, deferred, 8, now, later);
  }
};

TEST(ExpertLayerDeferral, AddsToTheNextLayerWhatWasDeferred) {
  for (const int tokens : {1, 13}) {
    Deferring d;
    const TestBatch a(tokens, 1), b(tokens, 2), c(tokens, 3);
    d.split(a, 2);
    EXPECT_EQ(forward(*d.first, a.call()), plain_forward(*d.first, a, d.now));
    std::vector<float> carry = plain_forward(*d.first, a, d.later);
    d.split(b, 1);
    EXPECT_EQ(forward(*d.second, b.call()), sum_of(plain_forward(*d.second, b, d.now), carry));
    carry = plain_forward(*d.second, b, d.later);
    EXPECT_EQ(forward(*d.last, c.call()), sum_of(plain_forward(*d.last, c), carry));
    EXPECT_EQ(forward(*d.last, c.call()), plain_forward(*d.last, c)) << "taken once";
  }
}

TEST(ExpertLayerDeferral, DropsWhatNoLaterLayerOfTheSameTokensTakes) {
  Deferring d;
  const TestBatch a(4, 1), b(5, 2);
  forward(*d.first, a.call());
  EXPECT_EQ(forward(*d.last, b.call()), plain_forward(*d.last, b)) << "another number of tokens";
  forward(*d.second, a.call());
  d.split(a, 2);
  EXPECT_EQ(forward(*d.first, a.call()), plain_forward(*d.first, a, d.now)) << "a layer before";
  forward(*d.first, a.call());
  std::thread([&] { EXPECT_EQ(forward(*d.last, a.call()), plain_forward(*d.last, a)); }).join();
}

// Both under the same path and with the same hidden size.
TEST(ExpertLayerDeferral, ModelsThatTakeTurnsLayerByLayerDoNotMix) {
  Deferring one, other;
  const TestBatch a(3, 1), b(3, 2);
  one.split(a, 2);
  other.split(b, 2);
  forward(*one.first, a.call());
  EXPECT_EQ(forward(*other.first, b.call()), plain_forward(*other.first, b, other.now));
  EXPECT_EQ(forward(*one.last, a.call()),
            sum_of(plain_forward(*one.last, a), plain_forward(*one.first, a, one.later)));
  EXPECT_EQ(forward(*other.last, b.call()),
            sum_of(plain_forward(*other.last, b), plain_forward(*other.first, b, other.later)));
}

TEST(ExpertLayerDeferral, MaskedExpertsAreNotDeferred) {
  std::vector<uint8_t> mask(8, 1);
  Deferring d;
  const TestBatch a(4, 1);
  d.first->set_mask(mask.data());
  EXPECT_THAT(forward(*d.first, a.call()), Each(0.0f));
  EXPECT_EQ(forward(*d.last, a.call()), plain_forward(*d.last, a));
}

TEST(ExpertLayer, SeveralThreadsAndTheTeamCallItAtOnce) {
  const auto layer = test_layer(small_team()), other = test_layer(small_team(), {.layer = 1});
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      ExpertLayer& mine = t == 2 ? *other : *layer;
      const TestBatch batch(1 + static_cast<int>(t) * 3, t);
      const std::vector<float> want = plain_forward(mine, batch);
      for (int i = 0; i < 50; ++i) EXPECT_EQ(forward(mine, batch.call()), want);
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(ExpertLayer, ThrowsInAForkedChild) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not allow threads after fork()";
#endif
  const auto layer = test_layer(small_team());
  const TestBatch batch(2);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(300);
    const std::string error = error_of([&] { forward(*layer, batch.call()); });
    _exit(error.find("made before fork") == std::string::npos ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// Whatever another thread of the parent was doing with the layer: here it reads a long mask most of the time.
TEST(ExpertLayer, EndsInAForkedChild) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not allow threads after fork()";
#endif
  constexpr ExpertsShape kMany{.experts = 4096, .hidden = 32, .inter = 32};
  const std::vector<uint8_t> mask(kMany.experts);
  auto layer = test_layer(small_team(), {.shape = kMany});
  layer->set_mask(mask.data());
  TestBatch batch(1, 7, kMany);
  batch.weights[0] = std::nanf("");
  std::atomic<bool> stop = false;
  std::thread reads([&] {
    while (!stop) error_of([&] { forward(*layer, batch.call()); });
  });
  int ended = 0;
  constexpr int kForks = 30;
  for (int i = 0; i < kForks; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(300);
      const bool threw =
          error_of([&] { layer->set_mask(nullptr); }).find("made before fork") != std::string::npos;
      layer.reset();
      _exit(threw ? 0 : 1);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) break;
    if (WEXITSTATUS(status) == 0) ++ended;
  }
  stop = true;
  reads.join();
  EXPECT_EQ(ended, kForks) << "a child hung, or did not throw";
}

// A figure to look at, not a test: what a layer costs on top of its experts.
TEST(ExpertLayer, PrintsItsOverhead) {
  std::vector<uint8_t> mask(8, 1);  // outlives the layer
  mask[0] = 0;
  const auto layer = test_layer(CpuTeam::shared({.threads = 1}));
  layer->set_mask(mask.data());
  const TestBatch batch(1);
  std::vector<float> out(64);
  const auto best_of = [](const auto& call) {
    double best = 1e9;
    for (int i = 0; i < 2000; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      call();
      best = std::min(
          best, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    }
    return best;
  };
  const double whole = best_of([&] { layer->forward(batch.call(), out.data()); });
  const double experts = best_of([&] {
    layer->experts().forward({.tokens = 1,
                              .top_k = 4,
                              .input = batch.input.data(),
                              .input_type = Real::kF32,
                              .ids64 = batch.ids.data(),
                              .weights = batch.weights.data(),
                              .output = out.data(),
                              .output_type = Real::kF32,
                              .skip = mask.data()});
  });
  CpuTeam::Task task;
  task.run = [] {};
  const double hand_over = best_of([&] { layer->team().wait(layer->team().submit(task)); });
  std::printf("  forward %.2f us, of experts %.2f us; submit and wait for an empty task %.2f us\n", whole,
              experts, hand_over);
}

}  // namespace
}  // namespace kt::inline hybrid
