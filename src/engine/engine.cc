#include "engine/engine.h"

#include <utility>

namespace kt::inline engine {

Engine::Engine(StepModel& model, const Tokenizer* tokenizer, SchedulerOptions options,
               std::function<void()> after_step)
    : scheduler_(model, tokenizer, options),
      after_step_(std::move(after_step)),
      stats_(scheduler_.stats()),
      thread_([this] { run(); }) {}

Engine::~Engine() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  arrived_.notify_all();
  thread_.join();
}

RequestId Engine::submit(GenerateRequest request) {
  scheduler_.check(request);
  RequestId id = 0;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) fail("engine: stopping, no new requests");
    id = ++last_id_;
    inbox_.requests.emplace_back(id, std::move(request));
    live_.insert(id);
  }
  arrived_.notify_all();
  return id;
}

void Engine::cancel(RequestId id) {
  {
    const std::lock_guard lock(mutex_);
    if (!live_.contains(id)) return;
    inbox_.cancels.push_back(id);
  }
  arrived_.notify_all();
}

void Engine::drop_cache() {
  {
    const std::lock_guard lock(mutex_);
    inbox_.drop_cache = true;
  }
  arrived_.notify_all();
}

void Engine::wait(RequestId id) {
  KT_CHECK(std::this_thread::get_id() != thread_.get_id(), "wait from on_event");
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return !live_.contains(id); });
}

void Engine::wait_all() {
  KT_CHECK(std::this_thread::get_id() != thread_.get_id(), "wait from on_event");
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return live_.empty(); });
}

Generated Engine::generate(GenerateRequest request) {
  Generated result;
  request.on_event = [&result, on_event = std::move(request.on_event)](const GenerateEvent& event) {
    if (event.token) result.tokens.push_back(*event.token);
    result.text += event.text;
    if (event.finish) result.finish = *event.finish;
    if (on_event) on_event(event);
  };
  wait(submit(std::move(request)));
  return result;
}

size_t Engine::live() const {
  const std::lock_guard lock(mutex_);
  return live_.size();
}

SchedulerStats Engine::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void Engine::take(Inbox inbox, std::vector<RequestId>& ended) {
  for (auto& [id, request] : inbox.requests) {
    const auto on_event = request.on_event;
    try {
      scheduler_.submit(std::move(request), id);
    } catch (const std::exception& error) {  // it was checked, so memory ran out
      ended.push_back(id);
      const Finish finish{.reason = FinishReason::kError, .error = error.what()};
      if (on_event) on_event({.id = id, .finish = &finish});
    }
  }
  for (RequestId id : inbox.cancels) scheduler_.cancel(id);
  if (inbox.drop_cache) scheduler_.drop_cache();
}

void Engine::run() {
  for (bool stopping = false; !stopping || !scheduler_.idle();) {
    Inbox inbox;
    std::vector<RequestId> ended;
    {
      std::unique_lock lock(mutex_);
      arrived_.wait(lock, [&] { return stopping_ || !inbox_.empty() || !scheduler_.idle(); });
      inbox = std::exchange(inbox_, {});
      stopping = stopping_;
    }
    try {
      take(std::move(inbox), ended);
      if (stopping) scheduler_.cancel_all();
      scheduler_.run_once();
    } catch (const std::exception& error) {
      scheduler_.fail_all(error.what());  // a bug of ours: those requests end, the engine does not
    }
    if (after_step_) after_step_();
    {
      const std::lock_guard lock(mutex_);
      for (RequestId id : scheduler_.take_ended()) live_.erase(id);
      for (RequestId id : ended) live_.erase(id);
      stats_ = scheduler_.stats();
    }
    ended_.notify_all();
  }
}

}  // namespace kt::inline engine
