// All that is in streams: whose memory calls take, which of them are open, what was deferred.
//
// Who waits for whom: a stream, in a kernel or a host function, for the team; the team for nothing but its
// own tasks, which always end; a thread that enqueues or launches may wait in the driver for its stream, and
// so for the team. So a task that waits for such a thread waits for itself: no task of ours takes a lock that
// is held over a call of the driver.
//
// Two locks. Whoever enqueues has the scope's, over calls of the driver: those may wait for the device, and
// so for callbacks, for tasks and for what tasks wait for. So the end of a layer and fork() take another one,
// under which nobody calls the driver.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/fork_mutex.h"
#include "hybrid/call_ring.h"
#include "hybrid/expert_layer_state.h"
#include "hybrid/stream_call.h"
#include "hybrid/stream_slots.h"

namespace kt::inline hybrid {

using LayerState = ExpertLayer::State;
using Layers = std::vector<std::shared_ptr<LayerState>>;

// Whose memory a call takes. A capture is of one context too.
struct CaptureKey {
  const void* context = nullptr;
  uint64_t capture = 0;
  auto operator<=>(const CaptureKey&) const = default;
};

struct CaptureScope {
  explicit CaptureScope(const CaptureKey& key)
      : key(key), slots(key.capture ? StreamSlots::Kind::kCaptured : StreamSlots::Kind::kEager) {}

  const CaptureKey key;
  std::mutex enqueueing;  // before the streams' lock; guards the next four
  StreamSlots slots;
  std::vector<std::unique_ptr<StreamCall>> captured;     // until release_buffers() after the graph's end
  std::shared_ptr<const std::atomic<bool>> graph_ended;  // by the driver; null before the first captured call
  bool gone = false;                                     // another one may have the key

  bool may_be_replayed() const { return graph_ended && !graph_ended->load(std::memory_order_acquire); }
  // Under the streams' lock: of abandoned calls, to be freed by who enqueues next.
  std::vector<StreamSlot*> returned;
};

// A submit whose result was not asked for yet.
struct OpenCall {
  std::shared_ptr<CaptureScope> scope;
  CudaStream stream = nullptr;
  StreamId id = {};  // of the stream
  StreamCall* it = nullptr;
  StreamSlot* slot = nullptr;
};

// What the last layer of a model deferred, for its next one, which may be on another stream of the same
// capture or the same thread.
struct StreamCarry {
  uint64_t capture = 0;
  std::thread::id thread;  // that submitted; of no matter in a capture
  const CpuTeam* team = nullptr;
  uint64_t model = 0;
  int layer = 0, tokens = 0;
  std::shared_ptr<DeferredSums> sums;
  // What the layer itself added. Its work reads that before any later layer's work defers something, as the
  // team works in order: the next layer writes there.
  std::shared_ptr<DeferredSums> spare;
};

struct InFlight {
  std::unique_ptr<StreamCall> it;
  std::shared_ptr<CaptureScope> scope = {};  // of an abandoned one
  StreamSlot* abandoned_slot = nullptr;      // to be freed with the call
};

// By which a context asks teams for work.
struct Rings {
  std::vector<std::shared_ptr<CallRing>> all;
  uint32_t numbers = 0;  // given to rings so far

  // The team's, or one of a team that ended: nobody else has that.
  std::shared_ptr<CallRing> find(const std::shared_ptr<CpuTeam>& team) const;
};

struct Streams {
  std::map<CaptureKey, std::shared_ptr<CaptureScope>> scopes;
  std::vector<OpenCall> open;
  std::vector<StreamCarry> carries;
  std::vector<InFlight> in_flight;
  std::vector<std::unique_ptr<StreamCall>> idle;
  size_t abandoned = 0;                // among `in_flight`
  std::map<const void*, Rings> rings;  // by context

  std::shared_ptr<CaptureScope> scope_of(const CaptureKey& key);
  std::vector<StreamCarry>::iterator carry_of(const LayerState& layer, uint64_t capture);
  std::vector<OpenCall>::iterator open_call(const LayerState& layer, const CaptureScope& scope,
                                            const StreamId& stream);
  // Layers that only finished work still held are added to `ended`, to be destroyed without the lock.
  void collect(Layers& ended);
  // Not yet among `in_flight` or `captured`.
  std::unique_ptr<StreamCall> idle_call(bool captures, Layers& ended);
  // The layer ended: nobody will ask for the results of its open calls.
  void abandon(const LayerState& layer);
};

// All streams, for one thread while it lives. A forked child has none of its parent's: what those hold is
// the parent's and is left alone.
class LockedStreams {
 public:
  LockedStreams();
  Streams& get() const;

 private:
  std::lock_guard<ForkMutex> lock_;
};

// A scope for one thread that enqueues.
class LockedScope {
 public:
  explicit LockedScope(const CaptureKey& key);
  explicit LockedScope(std::shared_ptr<CaptureScope> scope);
  CaptureScope& operator*() const { return *scope_; }
  CaptureScope* operator->() const { return scope_.get(); }
  const std::shared_ptr<CaptureScope>& shared() const { return scope_; }

 private:
  void free_returned();

  std::shared_ptr<CaptureScope> scope_;
  std::unique_lock<std::mutex> lock_;
};

// The ring by which the context asks the team for work, made if need be; null where it has no more of them.
std::shared_ptr<CallRing> ring_of(const std::shared_ptr<CpuTeam>& team, const void* context);

}  // namespace kt::inline hybrid
