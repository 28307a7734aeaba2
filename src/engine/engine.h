// A scheduler on a thread of its own, for callers on any thread.
#pragma once
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "engine/scheduler.h"

namespace kt::inline engine {

struct Generated {
  std::vector<SampledToken> tokens;
  std::string text;
  Finish finish;
};

class Engine {
 public:
  // The model and the tokenizer (or null) must outlive it; only the engine's thread calls the model.
  // after_step is called on its thread after every step, when the step's events have been delivered.
  Engine(StepModel& model, const Tokenizer* tokenizer, SchedulerOptions options = {},
         std::function<void()> after_step = {});
  // Cancels what still runs, delivers the last events and waits for them.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Errors of the request come at once, as from Scheduler::check; later ones come in its last event. Events
  // come on the engine's thread, which waits for them: they should be short. on_event may call submit and
  // cancel, but not wait.
  RequestId submit(GenerateRequest request);
  void check(const GenerateRequest& request) const { scheduler_.check(request); }
  void cancel(RequestId id);  // nothing if it is unknown or has ended
  // Until the request's last event has been delivered. At once for an unknown one.
  void wait(RequestId id);
  void wait_all();
  // Submits, waits and collects. on_event is called as well.
  Generated generate(GenerateRequest request);

  SchedulerStats stats() const;  // after the last step
  size_t live() const;           // requests submitted whose last event has not been delivered
  // Forgets cached beginnings, before the next step.
  void drop_cache();

 private:
  struct Inbox {
    std::vector<std::pair<RequestId, GenerateRequest>> requests = {};  // by rising id
    std::vector<RequestId> cancels = {};
    bool drop_cache = false;
    bool empty() const { return requests.empty() && cancels.empty() && !drop_cache; }
  };
  void run();
  void take(Inbox inbox, std::vector<RequestId>& ended);

  Scheduler scheduler_;  // of thread_, but for check()
  const std::function<void()> after_step_;

  mutable std::mutex mutex_;  // of everything below
  std::condition_variable arrived_, ended_;
  Inbox inbox_;
  std::unordered_set<RequestId> live_;  // submitted, last event not delivered
  SchedulerStats stats_;
  RequestId last_id_ = 0;
  bool stopping_ = false;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace kt::inline engine
