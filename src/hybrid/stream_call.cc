#include "hybrid/stream_call.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace kt::inline hybrid {
namespace {

constexpr size_t kKeptAtRest = 1 << 20;  // bytes

}  // namespace

std::shared_ptr<DeferredSums> DeferredSums::with_room(size_t size, std::shared_ptr<DeferredSums> spare) {
  if (spare && spare->size >= size) return spare;
  return std::make_shared<DeferredSums>(
      DeferredSums{.size = size, .values = std::make_shared_for_overwrite<float[]>(size)});
}

StreamCall::StreamCall() {
  now.run = [this] { run_now(); };
  later.run = [this] { run_later(); };
}

void StreamCall::run_now() noexcept {
  failed = false;
  try {
    if (deferred) {
      std::memcpy(kept_input.data(), call.input, kept_input.size());
      std::copy_n(call.weights, kept_weights.size(), kept_weights.begin());
    }
    layer->run(call, output, carry ? carry->values.get() : nullptr, deferred ? &pairs : nullptr);
  } catch (...) {
    failed = true;
    std::memset(output, 0, output_bytes);
    layer->forwards.keep(std::current_exception());
  }
  if (ring) std::atomic_ref(*busy).store(0, std::memory_order_release);
}

void StreamCall::run_later() noexcept {
  float* const sums = deferred->values.get();
  try {
    LayerCall again = call;
    again.input = kept_input.data();
    again.weights = kept_weights.data();
    if (!failed) return layer->run_deferred(again, pairs, sums);
  } catch (...) {
    layer->forwards.keep(std::current_exception());
  }
  std::fill_n(sums, int64_t{call.tokens} * layer->options.shape.hidden, 0.0f);
}

bool StreamCall::finished() const noexcept {
  if (ring && !abandoned && !closed) return false;
  if (!(abandoned || ring ? started : waited).load(std::memory_order_acquire)) return false;
  const CpuTeam& team = *layer->team;
  return team.done(now.ticket) && (!deferred || team.done(later.ticket));
}

bool StreamCall::can_start() const noexcept {
  return layer->team->done(now.ticket) && layer->team->done(later.ticket);
}

bool StreamCall::wait_for_ring(std::chrono::milliseconds patience) const noexcept {
  if (!ring) return true;
  const std::atomic_ref word(*busy);
  std::chrono::steady_clock::time_point gap_since{};
  while (word.load(std::memory_order_acquire) != 0 && ring->holds(*this)) {
    const auto now = std::chrono::steady_clock::now();
    if (!ring->has_gap()) gap_since = {};
    if (ring->has_gap() && gap_since.time_since_epoch().count() == 0) gap_since = now;
    if (gap_since.time_since_epoch().count() != 0 && now - gap_since > patience) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

std::shared_ptr<ExpertLayer::State> StreamCall::rest() {
  carry.reset();
  deferred.reset();
  ring.reset();
  if (kept_input.capacity() > kKeptAtRest) kept_input = {};
  if (kept_weights.capacity() * sizeof(float) > kKeptAtRest) kept_weights = {};
  return std::exchange(layer, nullptr);
}

void StreamCall::start(void* argument) noexcept {
  StreamCall& it = *static_cast<StreamCall*>(argument);
  CpuTeam& team = *it.layer->team;
  // Of the replay before: when no layer came after this one, or when nobody asked for its result. A ring
  // starts nothing before.
  if (!team.done(it.now.ticket)) team.wait(it.now.ticket);
  if (!team.done(it.later.ticket)) team.wait(it.later.ticket);
  team.submit(it.now);
  if (it.deferred) team.submit(it.later);
  if (it.ring && !it.captured) it.ring->expect(-1);
  if (it.waits_at_start) team.wait(it.now.ticket);
  it.started.store(true, std::memory_order_release);
}

void StreamCall::wait(void* argument) noexcept {
  StreamCall& it = *static_cast<StreamCall*>(argument);
  it.layer->team->wait(it.now.ticket);
  it.waited.store(true, std::memory_order_release);
}

}  // namespace kt::inline hybrid
