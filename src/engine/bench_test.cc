#include "engine/bench.h"

#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include "base/error.h"
#include "nn/work.h"

namespace kt::inline engine {
namespace {

// Counts what it is asked to do; likes no token best.
class CountingModel : public StepModel {
 public:
  explicit CountingModel(int pages, int slots = 0) : pages_(pages), slots_(slots) {}
  int vocabulary() const override { return 50; }
  int context() const override { return 1000; }
  int cache_pages() const override { return pages_; }
  int state_slots() const override { return slots_; }
  void copy_state(int, int) override { ++copies; }
  void step(std::span<const StepSequence> sequences, std::span<float> logits) override {
    for (const StepSequence& s : sequences) {
      work.at(kHost).bytes += static_cast<double>(s.tokens.size());
      if (s.tokens.size() == 1) said.insert(s.tokens[0]);
    }
    most = std::max(most, sequences.size());
    std::fill(logits.begin(), logits.end(), 0.0f);
  }
  Work work;
  size_t most = 0;
  int copies = 0;
  std::set<TokenId> said;  // fed alone

 private:
  int pages_, slots_;
};

TEST(Bench, RunsEveryPromptThenStepsOfAll) {
  const BenchCase c{.prompt = 100, .batch = 5, .output = 7};
  CountingModel model(bench_pages(c, 64));
  std::vector<double> fed;  // at the marks
  int between = 0;
  const BenchResult result =
      run_bench(model, c, 64,
                {.mark = [&] { fed.push_back(model.work.total().bytes); }, .between = [&] { ++between; }});
  ASSERT_EQ(fed.size(), 4u);
  EXPECT_EQ(fed[1] - fed[0], 500);
  EXPECT_EQ(fed[3] - fed[2], 35);
  EXPECT_GE(between, 500 / 64 + 7 - 1);
  EXPECT_EQ(model.most, 5u);
  EXPECT_GT(model.said.size(), 10u);  // of 50, drawn 35 times
  EXPECT_GT(result.prefill_seconds, 0);
  EXPECT_GT(result.decode_seconds, 0);
}

TEST(Bench, PromptsOfModelsWithStatesAreFoundAgain) {
  const BenchCase c{.prompt = 300, .batch = 5, .output = 70};
  CountingModel model(bench_pages(c, 64), bench_slots(c));
  std::vector<double> fed;
  run_bench(model, c, 64, {.mark = [&] { fed.push_back(model.work.total().bytes); }});
  ASSERT_EQ(fed.size(), 4u);
  EXPECT_EQ(fed[1] - fed[0], 5 * 300);
  EXPECT_EQ(fed[3] - fed[2], 5 * 70);
  EXPECT_LT(model.work.total().bytes, 2 * 5 * 300);  // or the second time it would have run all prompts again
  EXPECT_EQ(model.most, 5u);
  EXPECT_GE(model.copies, 5 + 5 + 5);  // each prompt there and back, each answer's page
}

TEST(Bench, WhatHappensBetweenStepsIsOffTheClock) {
  const BenchCase c{.prompt = 100, .batch = 1, .output = 5};
  CountingModel model(bench_pages(c, 64));
  const auto slowly = [] { std::this_thread::sleep_for(std::chrono::milliseconds(40)); };
  const BenchResult result = run_bench(model, c, 64, {.mark = slowly, .between = slowly});
  EXPECT_LT(result.prefill_seconds + result.decode_seconds,
            5 * 0.04);  // it slept for 4 + 1 + 4 times as long
}

TEST(Bench, LengthsThatDoNotFitAreRefused) {
  CountingModel model(100);
  EXPECT_THROW(run_bench(model, {.prompt = 1000, .batch = 1, .output = 2}, 64), Error);
  EXPECT_THROW(run_bench(model, {.prompt = 10, .batch = 1, .output = 0}, 64), Error);
}

}  // namespace
}  // namespace kt::inline engine
