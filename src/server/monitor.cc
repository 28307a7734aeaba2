#include "server/monitor.h"

#include <chrono>
#include <cmath>

namespace kt::inline server {
namespace {

constexpr std::chrono::milliseconds kInterval{250};
constexpr size_t kLooks = 5;          // a window of a second
constexpr double kMemoryTokens = 64;  // heat forgets in about so many tokens

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Monitor::Monitor(const Runner& runner, Rates rates, std::function<void()> on_look)
    : runner_(runner), experts_(runner.expert_counts()), rates_(rates), on_look_(std::move(on_look)) {
  if (experts_) {
    counted_ = experts_->snapshot();
    heat_.of_expert.resize(counted_.size());
  }
  looks_.push_back({now(), runner_.totals(), counted_});
  thread_ = std::thread([this] { run(); });
}

Monitor::~Monitor() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  thread_.join();
}

Pace Monitor::pace() const {
  const std::lock_guard lock(mutex_);
  return pace_;
}

ExpertHeat Monitor::heat() const {
  const std::lock_guard lock(mutex_);
  return heat_;
}

ExpertUse Monitor::experts_used() const {
  const std::lock_guard lock(mutex_);
  return experts_used_;
}

void Monitor::run() {
  std::unique_lock lock(mutex_);
  while (!stop_.wait_for(lock, kInterval, [this] { return stopping_; })) {
    lock.unlock();
    look();
    if (on_look_) on_look_();
    lock.lock();
  }
}

void Monitor::look() {
  looks_.push_back({now(), runner_.totals(), experts_ ? experts_->snapshot() : std::vector<uint64_t>()});
  if (looks_.size() > kLooks) looks_.pop_front();
  const Look &old = looks_.front(), &last = looks_.back();
  Pace pace;
  const double elapsed = last.at - old.at, busy = last.totals.seconds - old.totals.seconds;
  if (busy > 0 && elapsed > 0) {
    Work work = last.totals.work;
    work -= old.totals.work;
    const auto rate = [&](uint64_t a, uint64_t b) { return static_cast<double>(a - b) / elapsed; };
    pace.decode_tokens_per_s = rate(last.totals.decode_tokens, old.totals.decode_tokens);
    pace.prefill_tokens_per_s = rate(last.totals.prefill_tokens, old.totals.prefill_tokens);
    pace.read_bytes_per_s = work.total().bytes / busy;
    const Limit limit = limit_of(work, rates_);
    pace.fraction_of_limit = limit.seconds / busy;
    pace.limit = limit.which;
  }
  {
    const std::lock_guard lock(mutex_);
    pace_ = pace;
    if (experts_) experts_used_ = expert_use(*experts_, old.experts, last.experts).value_or(ExpertUse{});
  }
  if (experts_) warm(last.experts);
}

void Monitor::warm(const std::vector<uint64_t>& counts) {
  const auto experts = static_cast<size_t>(experts_->experts());
  const std::lock_guard lock(mutex_);
  for (size_t first = 0; first < counts.size(); first += experts) {
    uint64_t chosen = 0;
    for (size_t e = first; e < first + experts; ++e) chosen += counts[e] - counted_[e];
    if (chosen == 0) continue;
    const double tokens = static_cast<double>(chosen) / experts_->top_k();
    if (first == 0) heat_.tokens += static_cast<uint64_t>(std::llround(tokens));
    const double fresh = 1 - std::exp(-tokens / kMemoryTokens);
    const double even = static_cast<double>(chosen) / static_cast<double>(experts);
    for (size_t e = first; e < first + experts; ++e) {
      const double share = static_cast<double>(counts[e] - counted_[e]) / even;
      heat_.of_expert[e] += static_cast<float>(fresh * (share - heat_.of_expert[e]));
    }
  }
  counted_ = counts;
}

}  // namespace kt::inline server
