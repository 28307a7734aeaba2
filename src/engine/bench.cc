#include "engine/bench.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>

#include "base/checked.h"
#include "base/error.h"
#include "base/function_ref.h"

namespace kt::inline engine {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point then) {
  return std::chrono::duration<double>(Clock::now() - then).count();
}

// A model that says random tokens, at the cost of its own.
class RandomTokens : public StepModel {
 public:
  RandomTokens(StepModel& model, uint64_t seed) : model_(model), seed_(seed) {}
  int vocabulary() const override { return model_.vocabulary(); }
  int context() const override { return model_.context(); }
  int cache_pages() const override { return model_.cache_pages(); }
  int state_slots() const override { return model_.state_slots(); }
  void copy_state(int from_slot, int to_slot) override { model_.copy_state(from_slot, to_slot); }
  void step(std::span<const StepSequence> sequences, std::span<float> logits) override {
    model_.step(sequences, logits);
    const auto width = static_cast<size_t>(vocabulary());
    for (size_t row = 0; row < logits.size(); row += width)
      logits[row + static_cast<size_t>(uniform(seed_, drawn_++) * static_cast<double>(width))] =
          std::numeric_limits<float>::max();
  }

 private:
  StepModel& model_;
  uint64_t seed_, drawn_ = 0;
};

// Steps, at most, in which sequences that begin with cached pages feed the rest of their prompts: those that
// have started take one token each out of a step, so the last ones have the least.
int starting_steps(const BenchCase& c, int step_tokens) {
  const int least = std::max(1, step_tokens - c.batch + 1);
  return c.batch * ceil_div(std::min(c.prompt, kPageTokens), least) + 1;
}

// Steps on the clock, with what the caller does off it.
class Clocked {
 public:
  explicit Clocked(const BenchHooks& hooks) : hooks_(hooks) { mark(); }
  bool step(FunctionRef<bool()> work) {
    if (steps_ > 0 && hooks_.between) hooks_.between();
    const auto begin = Clock::now();
    const bool more = work();
    seconds_ += seconds_since(begin);
    ++steps_;
    return more;
  }
  void mark() const {
    if (hooks_.mark) hooks_.mark();
  }
  double seconds() const { return seconds_; }

 private:
  const BenchHooks& hooks_;
  double seconds_ = 0;
  int steps_ = 0;
};

// One scheduler with the case's prompts, and what became of them.
class Batch {
 public:
  Batch(StepModel& model, const BenchCase& c, int step_tokens)
      : model_(model),
        case_(c),
        scheduler_(model, nullptr, {.step_tokens = step_tokens, .sequences = c.batch}) {}

  void submit(int max_tokens) {
    started_ = 0;
    uint64_t draw = 0;
    for (int s = 0; s < case_.batch; ++s) {
      GenerateRequest request{.max_tokens = max_tokens};
      request.sampling.temperature = 0;
      for (int t = 0; t < case_.prompt; ++t)
        request.prompt.push_back(static_cast<TokenId>(uniform(case_.seed, draw++) * model_.vocabulary()));
      request.on_event = [this, first = true](const GenerateEvent& event) mutable {
        started_ += first && event.token;
        first = false;
        if (event.finish && event.finish->reason == FinishReason::kError) failed_ = *event.finish;
      };
      scheduler_.submit(std::move(request));
    }
  }
  bool step() {
    const bool more = scheduler_.run_once();
    if (failed_) throw Error(failed_->error_kind, failed_->error);
    return more;
  }
  bool all_started() const { return started_ == case_.batch; }
  void cancel() {
    scheduler_.cancel_all();
    while (step()) {
    }
  }

 private:
  StepModel& model_;
  BenchCase case_;
  Scheduler scheduler_;
  int started_ = 0;
  std::optional<Finish> failed_;
};

}  // namespace

int64_t bench_tokens(const BenchCase& c, int step_tokens) {
  return int64_t{c.prompt} + c.output + starting_steps(c, step_tokens);
}

int bench_pages(const BenchCase& c, int step_tokens) {
  // One more each: the scheduler admits a sequence only while the others could still grow by a page.
  return static_cast<int>(c.batch * (ceil_div(bench_tokens(c, step_tokens), int64_t{kPageTokens}) + 1));
}

int bench_slots(const BenchCase& c) {
  // Each runs, finds the snapshot of its prompt, and takes one of its answer without pushing out the prompt of
  // one that has not started yet.
  return 3 * c.batch;
}

BenchResult run_bench(StepModel& model, const BenchCase& c, int step_tokens, const BenchHooks& hooks) {
  if (c.output < 1) fail("output: expected at least 1 token, got {}", c.output);
  RandomTokens speaker(model, c.seed + 1);
  Batch batch(speaker, c, step_tokens);
  BenchResult out;
  batch.submit(1);
  {
    Clocked prefill(hooks);
    while (prefill.step([&] { return batch.step(); })) {
    }
    prefill.mark();
    out.prefill_seconds = prefill.seconds();
  }
  // Again, now with the prompts in the cache, for all answers to run side by side.
  batch.submit(c.output + starting_steps(c, step_tokens));
  while (!batch.all_started()) batch.step();
  {
    Clocked decode(hooks);
    for (int i = 0; i < c.output; ++i) decode.step([&] { return batch.step(); });
    decode.mark();
    out.decode_seconds = decode.seconds();
  }
  batch.cancel();
  return out;
}

}  // namespace kt::inline engine
