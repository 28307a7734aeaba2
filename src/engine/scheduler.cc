#include "engine/scheduler.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "engine/stop_matcher.h"
#include "text/tokenizer/detokenizer.h"

namespace kt::inline engine {

using Clock = std::chrono::steady_clock;

struct Scheduler::Job {
  Job(GenerateRequest given, const Tokenizer* tokenizer)
      : request(std::move(given)),
        tokens(request.prompt),
        sampler(request.sampling, request.prompt),
        stops(request.stop) {
    if (tokenizer) text.emplace(*tokenizer, request.special, TextPlace::kMiddle);
  }
  // Tokens whose keys and values are not in the cache: at least one.
  int todo() const { return static_cast<int>(tokens.size()) - sequence->tokens(); }
  int output_tokens() const { return static_cast<int>(tokens.size() - request.prompt.size()); }
  // Tokens of the prompt have still to be scored.
  bool scores_prompt() const { return request.prompt_logprobs && next_scored() < request.prompt.size(); }
  size_t next_scored() const { return request.prompt_logprobs_from + scores.size(); }
  // So many tokens may be fed before one whose logits are wanted for that.
  int unscored() const {
    return scores_prompt() ? std::max(0, static_cast<int>(next_scored()) - 1 - sequence->tokens()) : 0;
  }
  bool scores_next() const { return scores_prompt() && unscored() == 0; }
  // What may be found in the cache: logits of what is found there cannot be had.
  std::span<const TokenId> reusable() const {
    return scores_prompt() ? std::span(tokens).first(next_scored()) : std::span(tokens);
  }

  RequestId id = 0;
  GenerateRequest request;
  std::vector<TokenId> tokens;  // prompt and output
  Sampler sampler;
  std::vector<SampledToken> scores;  // of the prompt from prompt_logprobs_from on, as far as they are known
  std::optional<Detokenizer> text;
  StopMatcher stops;
  std::optional<StoredSequence> sequence;  // while running
  int most_output = 0;
  std::optional<int> cached_tokens;  // once admitted
  int chunk = 0;                     // tokens it feeds in this step
  std::set<int> snapshots;           // positions where one is wanted, whole pages
  bool cancelled = false, ended = false;
  Clock::time_point submitted = Clock::now();
  std::optional<Clock::time_point> first;  // token
};

std::string_view name_of(FinishReason reason) {
  constexpr std::string_view kNames[] = {"stop", "length", "cancelled", "error"};
  return kNames[static_cast<size_t>(reason)];
}

Scheduler::Scheduler(StepModel& model, const Tokenizer* tokenizer, SchedulerOptions options)
    : model_(model),
      tokenizer_(tokenizer),
      options_(options),
      store_({.pages = model.cache_pages(), .slots = model.state_slots()},
             [&model](int from, int to) { model.copy_state(from, to); }) {
  if (options.sequences < 1) fail("sequences: expected at least 1, got {}", options.sequences);
  if (options.step_tokens < options.sequences)
    fail("step_tokens: expected at least one for each of {} sequences, got {}", options.sequences,
         options.step_tokens);
  // More would be refused their slots anyway, but only after they had cost others cached pages.
  if (store_.has_states()) options_.sequences = std::min(options.sequences, store_.slots());
}

Scheduler::~Scheduler() = default;

int Scheduler::longest() const {
  const int64_t room = int64_t{store_.pages()} * kPageTokens;
  return static_cast<int>(std::min<int64_t>(model_.context(), room));
}

void Scheduler::check(const GenerateRequest& request) const {
  const auto length = static_cast<int64_t>(request.prompt.size());
  if (length == 0) fail("prompt: empty; expected at least 1 token");
  if (length + (request.max_tokens > 0 ? 1 : 0) > longest())
    fail("prompt: {} tokens leave no room for an answer in {} tokens (context {}, KV cache {} pages of {})",
         length, longest(), model_.context(), store_.pages(), kPageTokens);
  for (TokenId id : request.prompt)
    if (id < 0 || id >= model_.vocabulary())
      fail("prompt: token {} is outside the vocabulary of {}", id, model_.vocabulary());
  if (request.adapter < -1 || request.adapter >= model_.adapters())
    fail("adapter: {} of {}", request.adapter, model_.adapters());
  if (request.max_tokens < 0) fail("max_tokens: expected at least 0, got {}", request.max_tokens);
  if (!tokenizer_ && !request.stop.empty()) fail("stop: strings need a tokenizer, and there is none");
  check_sampling(request.sampling);
  check_sampling({.logprobs = request.prompt_logprobs});
  if (request.prompt_logprobs_from < 1)
    fail("prompt_logprobs_from: expected at least 1, got {}", request.prompt_logprobs_from);
  StopMatcher{request.stop};
}

RequestId Scheduler::submit(GenerateRequest request, RequestId id) {
  check(request);
  KT_CHECK(id > last_id_, "request {} after {}", id, last_id_);
  auto job = std::make_unique<Job>(std::move(request), tokenizer_);
  job->id = last_id_ = id;
  job->most_output =
      std::min(job->request.max_tokens, longest() - static_cast<int>(job->request.prompt.size()));
  jobs_.emplace(job->id, job.get());
  waiting_.push_back(std::move(job));
  return id;
}

void Scheduler::cancel(RequestId id) {
  const auto found = jobs_.find(id);
  if (found != jobs_.end()) found->second->cancelled = true;
}

void Scheduler::cancel_all() {
  for (auto& [id, job] : jobs_) job->cancelled = true;
}

SchedulerStats Scheduler::stats() const {
  SchedulerStats stats = counts_;
  stats.running = static_cast<int>(running_.size());
  stats.waiting = static_cast<int>(waiting_.size());
  stats.pages = store_.pages();
  stats.pages_held = store_.pages_held();
  stats.pages_cached = store_.pages_cached();
  stats.slots = store_.slots();
  stats.slots_held = store_.slots_held();
  stats.snapshots = store_.snapshots();
  return stats;
}

bool Scheduler::run_once() {
  end_cancelled();
  if (idle()) return false;
  take_turn();
  const int budget = plan_running();
  // Who has just been preempted would only take the pages back.
  if (reserve_or_preempt()) admit(budget);
  run_planned();
  remove_ended();
  return true;
}

void Scheduler::end_cancelled() {
  std::vector<Job*> cancelled;  // callbacks may submit, so nothing is iterated while they run
  for (const auto& job : running_)
    if (job->cancelled) cancelled.push_back(job.get());
  for (const auto& job : waiting_)
    if (job->cancelled) cancelled.push_back(job.get());
  for (Job* job : cancelled) finish(*job, {.reason = FinishReason::kCancelled});
  if (!cancelled.empty()) remove_ended();
}

// The next adapter, after that of the last step, among those of running sequences; with none the first that waits.
void Scheduler::take_turn() {
  if (running_.empty()) {
    if (!waiting_.empty()) turn_ = waiting_.front()->request.adapter;
    return;
  }
  std::optional<int> next, first;
  for (const auto& job : running_) {
    const int adapter = job->request.adapter;
    if (!first || adapter < *first) first = adapter;
    if (adapter > turn_ && (!next || adapter < *next)) next = adapter;
  }
  turn_ = next.value_or(*first);
}

// Chooses what running sequences feed; returns how many tokens are left for others. Those who generate come
// first, there is always a token for each, and then prompts, oldest first: one that stops early for a snapshot
// leaves room for younger ones, who must not starve when it goes on.
int Scheduler::plan_running() {
  int budget = step_budget();
  scored_left_ = kMostScored;
  const auto plan = [&](Job& job) {
    job.chunk = chunk_of(job, budget);
    budget -= job.chunk;
    if (job.scores_next()) scored_left_ -= job.chunk;
  };
  for (const auto& job : running_)
    if (job->todo() == 1) plan(*job);
  for (const auto& job : running_)
    if (job->todo() > 1) plan(*job);
  return budget;
}

int Scheduler::step_budget() const {
  const bool answering = std::ranges::any_of(running_, [](const auto& job) { return job->todo() == 1; });
  if (!answering || options_.shared_tokens == 0) return options_.step_tokens;
  const std::chrono::duration<double> pause = options_.max_pause;
  const double fit = token_seconds_ > 0 ? pause.count() / token_seconds_ : 0;
  return static_cast<int>(std::clamp<double>(fit, options_.shared_tokens, options_.step_tokens));
}

// What it feeds next, at most so many tokens: up to where a snapshot is wanted.
int Scheduler::chunk_of(const Job& job, int budget) const {
  if (job.request.adapter != turn_) return 0;
  int chunk = std::min(job.todo(), budget);
  if (job.scores_next())
    chunk = std::min(chunk, scored_left_);
  else if (job.scores_prompt())
    chunk = std::min(chunk, job.unscored());
  if (!store_.has_states()) return chunk;
  const int position = job.sequence->tokens();
  int border = (position / kMilestone + 1) * kMilestone;
  const auto wanted = job.snapshots.upper_bound(position);
  if (wanted != job.snapshots.end()) border = std::min(border, *wanted);
  return std::min(chunk, border - position);
}

// Where a sequence that has just been admitted should leave snapshots for others:
// - at the last border that leaves a token to run, for the same prompt again and for prompts that continue it:
//   the next turn of a chat, or another answer;
// - where the request says that others will part from it: before the last message, if that is asked in other words,
//   or if the template writes it otherwise once it is not the last;
// - where the beginning ends that it has in common with one before: if two have it, more will, as with the
//   instructions that all prompts of an application share. The first to come cannot know where that is.
//   (A running sequence learns of such a place from those that wait: begins_like_running.)
// Other borders of the prompt get none that lasts but milestones, as long as no other snapshot needs their slots: for
// prompts that part earlier, and so that preemption, or a client that goes away and comes back, does not cost all of a
// long one. A rolling snapshot follows the answer, which is part of the next turn, page by page.
void Scheduler::want_snapshots(Job& job) {
  if (!store_.has_states()) return;
  const auto border = [](size_t tokens) { return static_cast<int>(tokens) / kPageTokens * kPageTokens; };
  job.snapshots = {border(job.tokens.size() - 1), border(job.request.likely_shared), job.sequence->known()};
}

void Scheduler::keep_snapshot(Job& job) {
  const int position = job.sequence->tokens();
  if (!store_.has_states() || position % kPageTokens != 0) return;
  const bool in_prompt = position < static_cast<int>(job.request.prompt.size());
  if (!in_prompt)
    job.sequence->snapshot(SnapshotKind::kRolling);
  else if (job.snapshots.contains(position))
    job.sequence->snapshot(SnapshotKind::kLasting);
  else if (position % kMilestone == 0)
    job.sequence->snapshot(SnapshotKind::kMilestone);
}

// Makes room for what was planned, oldest first; false if that cost others their pages.
bool Scheduler::reserve_or_preempt() {
  bool all_stay = true;
  for (size_t i = 0; i < running_.size(); ++i) {
    Job& job = *running_[i];
    while (i < running_.size() && !job.sequence->reserve(job.sequence->tokens() + job.chunk)) {
      preempt_youngest();  // perhaps this one
      all_stay = false;
    }
  }
  return all_stay;
}

void Scheduler::preempt_youngest() {
  KT_CHECK(running_.size() > 1, "one sequence does not fit {} pages", store_.pages());
  std::unique_ptr<Job> job = std::move(running_.back());
  running_.pop_back();
  job->sequence.reset();
  ++counts_.preemptions;
  waiting_.push_front(std::move(job));
}

void Scheduler::admit(int budget) {
  while (budget > 0 && !waiting_.empty() && running_.size() < static_cast<size_t>(options_.sequences)) {
    Job& job = *waiting_.front();
    StoredSequence sequence = store_.start(job.reusable(), job.request.adapter);
    const int cached = sequence.tokens();
    if (begins_like_running(job, cached)) return;
    if (!sequence.reserve(static_cast<int>(job.tokens.size()) + std::min(job.most_output, 1))) return;
    if (static_cast<size_t>(store_.pages_available()) < running_.size()) return;
    if (!sequence.begin()) return;
    job.sequence = std::move(sequence);
    want_snapshots(job);
    if (!job.cached_tokens) job.cached_tokens = cached;
    counts_.tokens_reused += static_cast<uint64_t>(cached);
    job.chunk = chunk_of(job, budget);
    budget -= job.chunk;
    if (job.scores_next()) scored_left_ -= job.chunk;
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

// Whether a running sequence is about to fill pages that this one could use: then waiting costs a step or
// two, and not waiting a whole prompt. Several answers to one prompt come this way. Where the model has states
// the running one has to stop there for a snapshot.
bool Scheduler::begins_like_running(const Job& job, int cached) {
  if (job.scores_prompt()) return false;
  for (const auto& other : running_) {
    if (other->request.adapter != job.request.adapter) continue;
    const auto common = std::ranges::mismatch(other->tokens, job.tokens).in1 - other->tokens.begin();
    const auto usable = std::min<ptrdiff_t>(common, static_cast<ptrdiff_t>(job.tokens.size()) - 1) /
                        kPageTokens * kPageTokens;
    if (usable <= cached || usable <= other->sequence->tokens()) continue;
    if (store_.has_states()) {
      other->snapshots.insert(static_cast<int>(usable));
      other->chunk = chunk_of(*other, other->chunk);
    }
    return true;
  }
  return false;
}

void Scheduler::run_planned() {
  step_.clear();
  std::vector<Job*> planned;
  size_t rows = 0;
  for (const auto& job : running_) {
    if (job->chunk == 0) continue;
    const int position = job->sequence->tokens();
    const bool wants = job->chunk == job->todo() && job->most_output > 0;
    const auto tokens = std::span<const TokenId>(job->tokens)
                            .subspan(static_cast<size_t>(position), static_cast<size_t>(job->chunk));
    using Logits = StepSequence::Logits;
    step_.push_back({.tokens = tokens,
                     .position = position,
                     .pages = job->sequence->pages(),
                     .logits = job->scores_next() ? Logits::kAll
                               : wants            ? Logits::kLast
                                                  : Logits::kNone,
                     .slot = job->sequence->slot(),
                     .adapter = turn_});
    planned.push_back(job.get());
    rows += step_.back().logit_rows();
    counts_.tokens_fed += tokens.size();
  }
  KT_CHECK(!running_.empty(), "{} requests wait and none can run", waiting_.size());
  if (planned.empty()) return;  // whose turn it was gave its pages back; the oldest goes on in its own
  ++counts_.steps;
  logits_.resize(rows * static_cast<size_t>(model_.vocabulary()));
  const auto start = Clock::now();
  try {
    model_.step(step_, logits_);
  } catch (const std::exception& error) {
    for (Job* job : planned) finish_with_error(*job, error);
    return;
  }
  if (const auto fed =
          std::accumulate(step_.begin(), step_.end(), size_t{0},
                          [](size_t sum, const StepSequence& each) { return sum + each.tokens.size(); });
      options_.shared_tokens > 0 && fed >= static_cast<size_t>(options_.shared_tokens))
    token_seconds_ = std::chrono::duration<double>(Clock::now() - start).count() / static_cast<double>(fed);
  picks_.clear();
  for (size_t i = 0, row = 0; i < planned.size(); row += step_[i++].logit_rows()) {
    planned[i]->sequence->commit(step_[i].tokens);
    keep_snapshot(*planned[i]);
    gather_picks(*planned[i], step_[i], row);
  }
  pick_tokens();
  for (Pick& pick : picks_) {
    try {
      if (pick.error) std::rethrow_exception(pick.error);
      if (pick.given)
        take_score(*pick.job, std::move(pick.token));
      else if (!pick.job->ended)
        take_token(*pick.job, pick.token);
    } catch (const std::exception& error) {
      finish_with_error(*pick.job, error);
    }
  }
  for (Job* job : planned)
    if (job->most_output == 0 && !job->ended && job->todo() == 0)
      finish(*job, {.reason = FinishReason::kLength});
}

// What is to be done with the logits of tokens that were fed, the first of which are in `row`.
void Scheduler::gather_picks(Job& job, const StepSequence& fed, size_t row) {
  const std::vector<TokenId>& prompt = job.request.prompt;
  if (fed.logits == StepSequence::Logits::kAll)
    for (size_t i = 0; i < fed.tokens.size(); ++i) {
      const size_t next = static_cast<size_t>(fed.position) + i + 1;
      if (next >= job.next_scored() && next < prompt.size())
        picks_.push_back({.job = &job, .row = row + i, .given = prompt[next]});
    }
  if (job.todo() == 0 && job.most_output > 0)
    picks_.push_back({.job = &job, .row = row + fed.logit_rows() - 1});
}

// Chooses the next token of every row, or scores the one that comes. Rows know nothing of each other, so that the
// model's threads may share them; a few small ones are not worth waking anybody.
void Scheduler::pick_tokens() {
  const auto vocabulary = static_cast<size_t>(model_.vocabulary());
  const auto pick = [&](size_t index) {
    Pick& one = picks_[index];
    const auto logits = std::span(logits_).subspan(one.row * vocabulary, vocabulary);
    try {
      if (one.given) {
        one.token = scored_token(logits, *one.given, *one.job->request.prompt_logprobs);
        return;
      }
      TokenConstraint* constraint = one.job->request.constraint.get();
      one.token = one.job->sampler.pick(logits, constraint);
      if (constraint) constraint->accept(one.token.id);
    } catch (...) {
      one.error = std::current_exception();
    }
  };
  constexpr size_t kWorthSharing = 1 << 16;  // logits
  if (picks_.size() > 1 && picks_.size() * vocabulary >= kWorthSharing) {
    model_.spread(picks_.size(), pick);
  } else {
    for (size_t i = 0; i < picks_.size(); ++i) pick(i);
  }
}

void Scheduler::take_score(Job& job, SampledToken token) {
  if (job.ended) return;
  job.scores.push_back(std::move(token));
  if (!job.scores_prompt()) report(job, {.id = job.id, .prompt = job.scores});
}

// Reports one token, and the end where it is one.
void Scheduler::take_token(Job& job, const SampledToken& token) {
  ++counts_.tokens_sampled;
  if (!job.first) job.first = Clock::now();
  job.tokens.push_back(token.id);
  Finish end;
  bool ends = true;
  std::string shown;
  const auto show = [&](std::string_view text) {
    StopMatcher::Result result = job.stops.push(text);
    shown += result.text;
    end.stop = result.stop;
  };
  if (std::ranges::find(job.request.end_tokens, token.id) != job.request.end_tokens.end()) {
    end.end_token = token.id;
  } else {
    if (job.text) show(job.text->push(token.id));
    ends = end.stop || job.output_tokens() >= job.most_output;
    if (!end.stop) end.reason = FinishReason::kLength;
  }
  if (!ends) {
    report(job, {.id = job.id, .token = &token, .text = shown});
    return;
  }
  if (!end.stop && job.text) show(job.text->flush());
  if (!end.stop) shown += job.stops.flush();
  if (end.stop) end.reason = FinishReason::kStop;
  finish(job, std::move(end), &token, shown);
}

bool Scheduler::report(Job& job, const GenerateEvent& event) {
  if (!job.request.on_event) return true;
  try {
    job.request.on_event(event);
    return true;
  } catch (...) {
    job.request.on_event = {};
    job.cancelled = true;
    return false;
  }
}

void Scheduler::finish(Job& job, Finish finish, const SampledToken* token, std::string_view text) {
  if (job.ended) return;
  job.ended = true;
  const auto seconds = [&](Clock::time_point then) {
    return std::chrono::duration<double>(then - job.submitted).count();
  };
  finish.prompt_tokens = static_cast<int>(job.request.prompt.size());
  finish.output_tokens = job.output_tokens();
  finish.cached_tokens = job.cached_tokens.value_or(0);
  finish.seconds = seconds(Clock::now());
  if (job.first) finish.seconds_to_first = seconds(*job.first);
  job.sequence.reset();
  jobs_.erase(job.id);
  report(job, {.id = job.id, .token = token, .text = text, .finish = &finish});
  ended_.push_back(job.id);
}

void Scheduler::finish_with_error(Job& job, const std::exception& error) {
  const auto* ours = dynamic_cast<const Error*>(&error);
  finish(job, {.reason = FinishReason::kError,
               .error = error.what(),
               .error_kind = ours ? ours->kind() : ErrorKind::kInternal});
}

void Scheduler::fail_all(const std::string& message) {
  std::vector<Job*> all;
  for (const auto& [id, job] : jobs_) all.push_back(job);
  std::ranges::sort(all, {}, &Job::id);
  for (Job* job : all) finish_with_error(*job, Error(ErrorKind::kInternal, message));
  remove_ended();
}

void Scheduler::remove_ended() {
  const auto ended = [](const std::unique_ptr<Job>& job) { return job->ended; };
  std::erase_if(running_, ended);
  std::erase_if(waiting_, ended);
}

}  // namespace kt::inline engine
