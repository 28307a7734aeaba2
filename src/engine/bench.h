// How fast a model answers: a prompt length and a batch size at a time, through the scheduler that serves.
#pragma once
#include <cstdint>
#include <functional>

#include "engine/scheduler.h"

namespace kt::inline engine {

struct BenchCase {
  int prompt = 512;  // tokens of each sequence
  int batch = 1;     // sequences at once
  int output = 32;   // tokens timed of each answer
  uint64_t seed = 1;
};

struct BenchResult {
  double prefill_seconds = 0;  // all prompts, nothing else running
  double decode_seconds = 0;   // `output` steps in which every sequence gets one token and nothing else runs
};

// What the caller does off the clock.
struct BenchHooks {
  std::function<void()> mark = {};     // at the beginning and the end of prefill, then of decode
  std::function<void()> between = {};  // between two steps of either
};

// Tokens a sequence may grow to; pages the model's cache needs for all, and slots if it has states.
int64_t bench_tokens(const BenchCase& c, int step_tokens);
int bench_pages(const BenchCase& c, int step_tokens);
int bench_slots(const BenchCase& c);

// Random prompts without common beginnings, and random tokens after them: what a model without a prompt it
// understands says is soon one token again and again, whose experts a cache holds. Errors: as the
// scheduler's, for lengths that do not fit the context or the cache.
BenchResult run_bench(StepModel& model, const BenchCase& c, int step_tokens, const BenchHooks& hooks = {});

}  // namespace kt::inline engine
