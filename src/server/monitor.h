// Watches a running model: how fast it was in the last second, how close to the machine's limit, and which
// experts its routers choose. A thread of its own looks four times a second; readers get what it saw last.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/runner.h"
#include "models/expert_use.h"

namespace kt::inline server {

// Over the last second or so of work; zeros when idle.
struct Pace {
  double decode_tokens_per_s = 0, prefill_tokens_per_s = 0;
  double read_bytes_per_s = 0;   // weights and cache that steps had to read, while they ran
  double fraction_of_limit = 0;  // least time that work could take, over the time it took
  const char* limit = "memory";  // or "multiply"
};

// Recent choices of each expert relative to an even share: 1 is even, 0 cold.
struct ExpertHeat {
  std::vector<float> of_expert;  // [layers, experts]
  uint64_t tokens = 0;           // routed since the start
};

class Monitor {
 public:
  // The runner must outlive it. on_look is called on its thread each time it looks.
  Monitor(const Runner& runner, Rates rates, std::function<void()> on_look = {});
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  Pace pace() const;
  ExpertHeat heat() const;
  ExpertUse experts_used() const;  // over the last second or so of work; zeros when idle
  const Rates& rates() const { return rates_; }

 private:
  void run();
  void look();
  void warm(const std::vector<uint64_t>& counts);

  const Runner& runner_;
  const ExpertCounts* experts_;  // the runner's
  Rates rates_;
  std::function<void()> on_look_;

  struct Look {
    double at = 0;
    StepTotals totals;
    std::vector<uint64_t> experts;  // counts
  };
  std::deque<Look> looks_;         // of the thread, oldest first, about a second
  std::vector<uint64_t> counted_;  // of the thread: counts at the last look

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable stop_;
  bool stopping_ = false;
  Pace pace_;
  ExpertHeat heat_;
  ExpertUse experts_used_;
  std::thread thread_;
};

}  // namespace kt::inline server
