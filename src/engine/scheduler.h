// Continuous batching: many requests share the steps of one model. Decides who runs, feeds prompts in chunks
// between the tokens of others, samples, turns tokens into text and reports. One thread; Engine
// (engine/engine.h) is the front for many.
#pragma once
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/sampler.h"
#include "engine/sequence_store.h"
#include "engine/step_model.h"
#include "text/constraint.h"
#include "text/tokenizer/tokenizer.h"

namespace kt::inline engine {

using RequestId = uint64_t;  // rising, from 1

enum class FinishReason {
  kStop,       // an end token or a stop string
  kLength,     // max_tokens, or the context is full
  kCancelled,  //
  kError,
};
std::string_view name_of(FinishReason reason);  // "stop", "length", "cancelled", "error"

struct Finish {
  FinishReason reason = FinishReason::kStop;
  std::optional<size_t> stop = {};        // which stop string
  std::optional<TokenId> end_token = {};  // which end token
  std::string error = {};                 // one line, for kError
  ErrorKind error_kind = ErrorKind::kInternal;
  int prompt_tokens = 0, output_tokens = 0;
  int cached_tokens = 0;                     // of the prompt, found in the cache when it was first admitted
  double seconds_to_first = 0, seconds = 0;  // since it was submitted
};

// Views are valid during the call.
struct GenerateEvent {
  RequestId id = 0;
  const SampledToken* token = nullptr;  // null where the end comes without one
  std::string_view text = {};           // whole characters that became certain; end tokens have none
  const Finish* finish = nullptr;       // set in the last event of a request, which always comes
  // Of a request with prompt_logprobs, once and before all else: the prompt's tokens from prompt_logprobs_from on, so
  // never the first, which nothing comes before. Not for a prompt that ends there.
  std::span<const SampledToken> prompt = {};
};

struct GenerateRequest {
  std::vector<TokenId> prompt = {};
  int max_tokens = 16;  // cut to what the context leaves; 0: the prompt runs, and that is all
  SamplingOptions sampling = {};
  std::vector<TokenId> end_tokens = {};
  std::vector<std::string> stop = {};
  SpecialTokens special = SpecialTokens::kSkip;  // in the text
  // Report the prompt's tokens as SamplingOptions::logprobs does those that are chosen. It takes logits of every one of
  // them, so none is taken from the cache, and they run in small pieces.
  std::optional<int> prompt_logprobs = {};
  // The first of them that is reported, at least 1: those before cost what they cost anyway.
  size_t prompt_logprobs_from = 1;
  int adapter = -1;  // StepModel's; -1: none
  // Of the prompt, how many tokens prompts to come are likely to begin with besides all of them: a conversation's
  // without its last message. Where the model has states, that they may go on from there is worth a snapshot. 0: not
  // known.
  size_t likely_shared = 0;
  // What the answer is held to, for this request alone; at its beginning. If it throws, the request ends with
  // that error. It is asked once for each token, in order: preemption feeds tokens again but samples none.
  std::shared_ptr<TokenConstraint> constraint = {};
  // From the scheduler's thread. If it throws, the request ends and it is not called again.
  std::function<void(const GenerateEvent&)> on_event = {};
};

struct SchedulerOptions {
  int step_tokens = 512;  // fed in one step, prompts and single tokens together
  int sequences = 64;     // running at once; at most step_tokens, and cut to what the model has slots for
  // While somebody is answering, prompts get as many tokens of a step as take no longer than the pause, by how long
  // such steps took so far, and at least these; 0: always step_tokens.
  int shared_tokens = 0;
  std::chrono::milliseconds max_pause{400};
};

struct SchedulerStats {
  int running = 0, waiting = 0;
  int pages = 0, pages_held = 0, pages_cached = 0;
  int slots = 0, slots_held = 0, snapshots = 0;  // of states; 0 for models without
  uint64_t steps = 0, tokens_fed = 0, tokens_sampled = 0, tokens_reused = 0, preemptions = 0;
};

// First come, first served: requests are admitted in order, and running ones keep that order. A request is
// admitted when its prompt fits the free pages and every running one could still grow by a page; how long the
// answers get nobody knows, and reserving max_tokens for each would leave most of the memory idle. When pages
// run out all the same, the youngest gives its pages back and goes to the head of the queue, to run again
// what it had (mostly found in the cache). The oldest always goes on, so all end. Each step feeds one token
// of everyone who is generating and prompts in chunks, oldest first, up to step_tokens.
//
// Where requests have several adapters, steps are those of one of them, in turns. What one computed of a beginning is
// nothing to the others.
//
// Where the model has states, a beginning is known only up to a snapshot (engine/sequence_store.h), and a
// snapshot can only be taken between steps: chunks end where one is wanted. Each costs a copy and perhaps a
// step, so they are few; see Scheduler::want_snapshots.
class Scheduler {
 public:
  // The model and the tokenizer must outlive it. Without a tokenizer there is no text, and stop strings are
  // refused.
  Scheduler(StepModel& model, const Tokenizer* tokenizer, SchedulerOptions options = {});
  ~Scheduler();

  // Error(kInput) for a prompt that is empty, too long or outside the vocabulary, max_tokens below 0, and bad
  // sampling options or stop strings. From any thread.
  void check(const GenerateRequest& request) const;
  // Checks and queues. May be called from on_event, as may cancel.
  RequestId submit(GenerateRequest request) { return submit(std::move(request), last_id_ + 1); }
  RequestId submit(GenerateRequest request, RequestId id);  // higher than all before
  // Its last event comes with the next run_once. Nothing if it is unknown or has ended.
  void cancel(RequestId id);
  void cancel_all();

  // One step of the model, if anything is to do; false if not. Throws only what only we can cause.
  bool run_once();
  // Ends all requests with this error.
  void fail_all(const std::string& message);
  bool idle() const { return jobs_.empty(); }
  SchedulerStats stats() const;
  // Requests that ended since the last call, after their last event.
  std::vector<RequestId> take_ended() { return std::exchange(ended_, {}); }
  // Forgets what ended requests left in the cache.
  void drop_cache() { store_.drop_cached(); }

 private:
  struct Job;
  int longest() const;  // sequence that context and pages allow
  void end_cancelled();
  void take_turn();
  int plan_running();
  int step_budget() const;
  int chunk_of(const Job& job, int budget) const;
  void want_snapshots(Job& job);
  void keep_snapshot(Job& job);
  bool reserve_or_preempt();
  void preempt_youngest();
  void admit(int budget);
  bool begins_like_running(const Job& job, int cached);
  void run_planned();
  void gather_picks(Job& job, const StepSequence& fed, size_t row);
  void pick_tokens();
  void take_score(Job& job, SampledToken token);
  void take_token(Job& job, const SampledToken& token);
  void finish(Job& job, Finish finish, const SampledToken* token = nullptr, std::string_view text = {});
  void finish_with_error(Job& job, const std::exception& error);
  bool report(Job& job, const GenerateEvent& event);
  void remove_ended();

  // Tokens between the milestones of a long prompt.
  static constexpr int kMilestone = 64 * kPageTokens;
  // Prompt tokens whose logits a step gives, for all requests together: 80 MB for 150,000 tokens.
  static constexpr int kMostScored = 128;

  StepModel& model_;
  const Tokenizer* tokenizer_;
  SchedulerOptions options_;
  double token_seconds_ = 0;  // of the last large step; 0: there was none
  SequenceStore store_;
  std::vector<std::unique_ptr<Job>> running_;  // oldest first
  std::deque<std::unique_ptr<Job>> waiting_;   // oldest first, all younger than the running ones
  std::unordered_map<RequestId, Job*> jobs_;   // both
  std::vector<RequestId> ended_;
  std::vector<StepSequence> step_;
  std::vector<float> logits_;  // [rows of the step, vocabulary]
  struct Pick {
    Job* job = nullptr;
    size_t row = 0;                     // of logits_
    std::optional<TokenId> given = {};  // the prompt's next token, to be scored; none: one is to be chosen
    SampledToken token = {};
    std::exception_ptr error = {};
  };
  std::vector<Pick> picks_;
  int scored_left_ = 0;  // of kMostScored, in the step that is planned
  int turn_ = -1;        // whose step it is: an adapter
  RequestId last_id_ = 0;
  SchedulerStats counts_;
};

}  // namespace kt::inline engine
