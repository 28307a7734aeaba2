#include "hybrid/streams.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace kt::inline hybrid {
namespace {

// Never destroyed: at the end of the process streams may still be at work.
struct SharedStreams {
  ForkMutex mutex{ForkLock::kStreams};
  std::unique_ptr<Streams> streams = std::make_unique<Streams>();
  uint32_t made_after_forks = forks();
};

SharedStreams& shared_streams() {
  static SharedStreams& it = *std::make_unique<SharedStreams>().release();
  return it;
}

[[maybe_unused]] const SharedStreams& made_early = shared_streams();  // before threads that fork

}  // namespace

std::shared_ptr<CallRing> Rings::find(const std::shared_ptr<CpuTeam>& team) const {
  for (const std::shared_ptr<CallRing>& ring : all)
    if (ring->is_of(team) && ring.use_count() > 1) return ring;
  for (const std::shared_ptr<CallRing>& ring : all) {
    if (ring.use_count() > 1) continue;
    std::atomic_thread_fence(std::memory_order_acquire);  // what the ended team's thread wrote
    ring->pass_on({});
    return ring;
  }
  return nullptr;
}

std::shared_ptr<CaptureScope> Streams::scope_of(const CaptureKey& key) {
  std::shared_ptr<CaptureScope>& scope = scopes[key];
  if (!scope) scope = std::make_shared<CaptureScope>(key);
  return scope;
}

std::vector<StreamCarry>::iterator Streams::carry_of(const LayerState& layer, uint64_t capture) {
  return std::find_if(carries.begin(), carries.end(), [&](const StreamCarry& carry) {
    return carry.capture == capture && (capture || carry.thread == std::this_thread::get_id()) &&
           carry.team == layer.team.get() && carry.model == layer.model_slot.model();
  });
}

std::vector<OpenCall>::iterator Streams::open_call(const LayerState& layer, const CaptureScope& scope,
                                                   const StreamId& stream) {
  return std::find_if(open.begin(), open.end(), [&](const OpenCall& call) {
    return call.scope.get() == &scope && call.id == stream && call.it->layer.get() == &layer;
  });
}

void Streams::collect(Layers& ended) {
  for (size_t i = 0; i < in_flight.size();) {
    if (!in_flight[i].it->finished()) {
      ++i;
      continue;
    }
    if (StreamSlot* const slot = in_flight[i].abandoned_slot) {
      in_flight[i].scope->returned.push_back(slot);
      --abandoned;
    }
    ended.push_back(in_flight[i].it->rest());
    idle.push_back(std::move(in_flight[i].it));
    in_flight[i] = std::move(in_flight.back());
    in_flight.pop_back();
  }
}

std::unique_ptr<StreamCall> Streams::idle_call(bool captures, Layers& ended) {
  if (abandoned || (!captures && idle.empty())) collect(ended);
  if (captures || idle.empty()) return std::make_unique<StreamCall>();
  std::unique_ptr<StreamCall> it = std::move(idle.back());
  idle.pop_back();
  return it;
}

void Streams::abandon(const LayerState& layer) {
  for (size_t i = 0; i < open.size();) {
    const OpenCall call = open[i];
    if (call.it->layer.get() != &layer) {
      ++i;
      continue;
    }
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
    if (call.scope->key.capture) continue;  // a replay may still run it
    const auto flight = std::find_if(in_flight.begin(), in_flight.end(),
                                     [&](const InFlight& other) { return other.it.get() == call.it; });
    flight->scope = call.scope;
    flight->abandoned_slot = call.slot;
    call.it->abandoned = true;
    ++abandoned;
  }
}

LockedStreams::LockedStreams() : lock_(shared_streams().mutex) {
  SharedStreams& it = shared_streams();
  if (it.made_after_forks == forks()) return;
  static_cast<void>(it.streams.release());
  it.streams = std::make_unique<Streams>();
  it.made_after_forks = forks();
}

Streams& LockedStreams::get() const { return *shared_streams().streams; }

LockedScope::LockedScope(const CaptureKey& key) {
  for (;;) {
    scope_ = LockedStreams().get().scope_of(key);
    lock_ = std::unique_lock(scope_->enqueueing);
    if (!scope_->gone) break;
    lock_.unlock();
  }
  free_returned();
}

LockedScope::LockedScope(std::shared_ptr<CaptureScope> scope)
    : scope_(std::move(scope)), lock_(scope_->enqueueing) {
  free_returned();
}

void LockedScope::free_returned() {
  const LockedStreams locked;
  for (StreamSlot* const slot : scope_->returned) StreamSlots::free(*slot);
  scope_->returned.clear();
}

std::shared_ptr<CallRing> ring_of(const std::shared_ptr<CpuTeam>& team, const void* context) {
  std::shared_ptr<CallRing> ring;
  uint32_t number = 0;
  {
    const LockedStreams locked;
    Rings& rings = locked.get().rings[context];
    ring = rings.find(team);
    if (ring && ring->is_of(team)) return ring;
    if (ring) ring->pass_on(team);
    if (!ring && rings.numbers == CudaRing::kMost) return nullptr;
    if (!ring) number = rings.numbers++;
  }
  if (!ring) {  // its memory comes from the driver, which may wait
    try {
      ring = std::make_shared<CallRing>(number, team);
    } catch (const Error& error) {  // copies need none
      log_once(LogLevel::kWarning, "{}: calls are handed over by copies and host functions", error.what());
      return nullptr;
    }
    const LockedStreams locked;
    Rings& rings = locked.get().rings[context];
    rings.all.push_back(ring);
    const std::shared_ptr<CallRing> first = rings.find(team);
    if (first != ring) {  // another thread's was sooner: this one is for the next team
      ring->pass_on({});
      return first;
    }
  }
  team->listen(ring);
  return ring;
}

}  // namespace kt::inline hybrid
