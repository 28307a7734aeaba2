// A loaded model as the handlers of the API see it: the engine, the template, the syntax of its answers, and
// what is counted. Knows HTTP's values but no sockets beyond the Responder it answers through.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "engine/engine.h"
#include "engine/loaded_model.h"
#include "engine/runner.h"
#include "server/answer.h"
#include "server/metrics.h"
#include "server/monitor.h"
#include "server/syntax/chat_syntax.h"
#include "text/chat_template.h"
#include "text/grammar/grammar.h"

namespace kt::inline server {

struct ServiceOptions {
  std::string name;                              // of the model, as clients see it
  std::string version;                           // of the program
  int max_running = 8;                           // requests at once
  std::chrono::milliseconds max_pause{400};      // of answers, while a prompt runs (SchedulerOptions)
  int max_waiting = 512;                         // beyond those; 429 for more
  int pages = 0;                                 // of the KV cache
  std::optional<uint64_t> state_snapshots = {};  // bytes (MemoryRequest's)
  int max_answers = 64;                          // prompts times n of one request
  double request_timeout_s = 0;                  // an answer is cut off after so long; 0: never
  Rates rates = {};                              // of this machine, for fractions of the limit
  ChatSyntax syntax = {};                        // of the model's answers
  std::string chat_template = {};                // "": chats are refused
  OrderedJson placement = {};                    // what lies where (OpenedModel::placement_json)
  std::function<int()> connections = {};         // open ones, for the metrics
};

class Service {
 public:
  // `post` runs a call on the server's thread. The model must outlive this.
  Service(LoadedModel& model, ServiceOptions options, std::function<void(std::function<void()>)> post);
  ~Service();

  const ServiceOptions& options() const { return options_; }
  LoadedModel& model() { return model_; }
  const LoadedModel& model() const { return model_; }
  const Runner& runner() const { return *runner_; }
  const Tokenizer& tokenizer() const { return model_.tokenizer(); }
  const ChatTemplate* chat_template() const { return template_ ? &*template_ : nullptr; }
  RequestMetrics& metrics() { return metrics_; }
  const Monitor& monitor() const { return *monitor_; }
  SchedulerStats stats() const { return engine_->stats(); }
  StepTotals totals() const { return runner_->totals(); }
  int64_t started() const { return started_; }  // seconds since 1970
  double uptime() const;
  int connections() const { return options_.connections ? options_.connections() : 0; }
  int longest() const;  // tokens a sequence may have: the context, or the cache if that is smaller
  // ApiError(400) for a text that cannot fit however it is cut into tokens; spares cutting it.
  void check_length(std::string_view text, const char* name) const;
  // Gives freed memory back to the system before long: after a request that took much, whether it was answered or
  // refused. More than once, since its reply is freed when the client has it.
  void trim_soon() { trims_ = kTrims; }

  // Sampling as the model's generation_config.json has it.
  // Which of the model's adapters a request's "model" names: NAME:ADAPTER, or the adapter's name alone; -1: none.
  // ApiError(404) for NAME with an adapter that is not there; other names are this model's, as clients send any.
  int adapter_named(std::string_view model) const;
  std::string model_name(int adapter) const;  // as clients see it

  const SamplingOptions& default_sampling() const { return default_sampling_; }
  // Holds one sequence to a grammar; ends at the model's end tokens.
  std::shared_ptr<TokenConstraint> constraint(const Grammar& grammar);
  // json_schema_grammar, remembering the schemas seen last.
  Grammar schema_grammar(const OrderedJson& schema);

  // Submits the requests of one answer: all or none. Their events reach it on the server's thread; if the
  // client goes, they are cancelled. ApiError(400) for what the engine refuses, 429 when too many wait, 503
  // after drain().
  void run(const std::shared_ptr<Answer>& answer, std::vector<GenerateRequest> requests);
  // What is wrong once a file of the model has lost bytes that are read as tokens need them, or the GPU is lost; and
  // as ApiError(503).
  static std::optional<std::string> model_fault();
  static void check_model();
  void post(std::function<void()> call) const { post_(std::move(call)); }

  void drain() { draining_ = true; }
  bool idle() const;  // no answer is being made
  void cancel(Answer& answer);
  void cancel_all();

 private:
  friend class Answer;
  std::vector<std::shared_ptr<Answer>> answers() const;
  void forget(const Answer* answer);
  void deliver();
  void look_after();
  void end_overdue();

  LoadedModel& model_;
  const ServiceOptions options_;
  std::function<void(std::function<void()>)> post_;
  std::optional<ChatTemplate> template_;
  SamplingOptions default_sampling_;
  std::unique_ptr<Runner> runner_;
  RequestMetrics metrics_;
  const int64_t started_;
  const std::chrono::steady_clock::time_point start_;
  std::atomic<bool> draining_ = false;
  static constexpr int kTrims = 4;  // over a second
  std::atomic<int> trims_ = 0;      // still to do
  size_t longest_token_ = 1;        // bytes

  mutable std::mutex mutex_;  // of what follows
  std::unique_ptr<TokenTrie> trie_;
  std::list<std::pair<std::string, Grammar>> schemas_;  // used last first
  std::unordered_map<const Answer*, std::weak_ptr<Answer>> answers_;

  // What the step that runs has brought so far; of the engine's thread.
  struct Brought {
    std::shared_ptr<Answer> answer;
    size_t sequence = 0;
    AnswerEvent event;
  };
  std::vector<Brought> brought_;

  std::unique_ptr<Monitor> monitor_;
  std::unique_ptr<Engine> engine_;  // last: its thread uses what is above
};

}  // namespace kt::inline server
