// For tests: requests, and who listens to their events.
#pragma once
#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <string>
#include <vector>

#include "engine/scheduler.h"

namespace kt::inline engine {

// What came of a request.
struct Heard {
  std::vector<TokenId> tokens;
  std::string text;
  std::optional<Finish> finish;
  std::vector<SampledToken> prompt;
};

inline GenerateRequest heard_by(Heard& heard, GenerateRequest request) {
  request.on_event = [&heard](const GenerateEvent& event) {
    EXPECT_FALSE(heard.finish);
    if (event.token) heard.tokens.push_back(event.token->id);
    heard.text += event.text;
    if (event.finish) heard.finish = *event.finish;
    if (event.prompt.empty()) return;
    EXPECT_TRUE(heard.prompt.empty() && heard.tokens.empty());
    heard.prompt.assign(event.prompt.begin(), event.prompt.end());
  };
  return request;
}

inline void run(Scheduler& scheduler) {
  while (scheduler.run_once()) ASSERT_LT(scheduler.stats().steps, 100000u);
}

// Prompts with common beginnings, some greedy, some sampled, some with end tokens.
inline GenerateRequest random_request(std::mt19937& rng) {
  GenerateRequest request;
  const size_t shared = rng() % 4 * 50;
  for (size_t i = 0; i < shared; ++i) request.prompt.push_back(static_cast<TokenId>(i));
  for (size_t i = rng() % 60 + 1; i > 0; --i) request.prompt.push_back(static_cast<TokenId>(rng() % 250));
  request.max_tokens = static_cast<int>(rng() % 100) + 1;
  request.sampling = {.temperature = rng() % 2 * 0.7, .seed = rng()};
  if (rng() % 3 == 0) request.sampling.repetition_penalty = 1.3;
  if (rng() % 3 == 0) request.end_tokens = {7, 19};
  return request;
}

}  // namespace kt::inline engine
