#include "engine/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>

#include "engine/testing/fake_model.h"

namespace kt::inline engine {
namespace {

TEST(Engine, GeneratesFromManyThreads) {
  const Tokenizer tokenizer = byte_tokenizer();
  FakeModel model({.pages = 40});
  Engine engine(model, &tokenizer, {.step_tokens = 64, .sequences = 8});
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 rng(t);
      for (int i = 0; i < 20; ++i) {
        GenerateRequest request{.prompt = std::vector<TokenId>(rng() % 150 + 1, 3),
                                .max_tokens = static_cast<int>(rng() % 30 + 1),
                                .sampling = {.seed = rng()}};
        const std::vector<TokenId> expected = plain_generation(FakeModel(), request);
        const Generated result = engine.generate(request);
        std::vector<TokenId> ids;
        for (const SampledToken& token : result.tokens) ids.push_back(token.id);
        right += ids == expected && result.text == tokenizer.decode(expected);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 80);
  engine.wait_all();
  EXPECT_EQ(engine.stats().pages_held, 0);
  EXPECT_EQ(engine.stats().running + engine.stats().waiting, 0);
}

TEST(Engine, CancelsFromOtherThreadsAndFromEvents) {
  FakeModel model({.context = 100000, .pages = 2000});
  Engine engine(model, nullptr);
  std::atomic<int> cancelled = 0;
  std::atomic<bool> begun = false;
  const auto count = [&](const GenerateEvent& event) {
    begun = true;
    if (event.finish) cancelled += event.finish->reason == FinishReason::kCancelled;
  };
  const RequestId id = engine.submit({.prompt = {1}, .max_tokens = 50000, .on_event = count});
  while (!begun) std::this_thread::yield();
  engine.cancel(id);
  engine.wait(id);
  EXPECT_EQ(cancelled, 1);
  int tokens = 0;
  engine.wait(engine.submit({.prompt = {2}, .max_tokens = 50000, .on_event = [&](const GenerateEvent& event) {
                               count(event);
                               if (++tokens == 5) engine.cancel(event.id);
                             }}));
  EXPECT_EQ(cancelled, 2);
  engine.cancel(12345);
  engine.wait(12345);
  EXPECT_EQ(engine.stats().pages_held, 0);
}

TEST(Engine, EndsWhatStillRuns) {
  FakeModel model;
  std::atomic<int> ended = 0;
  {
    Engine engine(model, nullptr);
    for (int i = 0; i < 30; ++i)
      engine.submit({.prompt = {i}, .max_tokens = 900, .on_event = [&](const GenerateEvent& event) {
                       ended += event.finish != nullptr;
                     }});
  }
  EXPECT_EQ(ended, 30);
}

TEST(Engine, ErrorsOfARequestComeAtOnce) {
  FakeModel model({.throw_for = 99});
  Engine engine(model, nullptr);
  EXPECT_THROW(engine.submit({}), Error);
  EXPECT_THROW(engine.submit({.prompt = {1}, .max_tokens = -1}), Error);
  EXPECT_EQ(engine.generate({.prompt = {99}}).finish.error, "the step broke");
  EXPECT_EQ(engine.generate({.prompt = {1}, .max_tokens = 3}).tokens.size(), 3u);
  engine.drop_cache();
}

}  // namespace
}  // namespace kt::inline engine
