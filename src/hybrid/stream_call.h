// One submit in a stream, as its callbacks see it. Callbacks run on the driver's threads: they take no lock
// that is held while the driver is called, and give nothing back.
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <vector>

#include "hybrid/call_ring.h"
#include "hybrid/expert_layer_state.h"

namespace kt::inline hybrid {

// What a layer deferred: [tokens, hidden] sums for the next layer of its model. The team works in order, so
// the reader needs no other word that they are written.
struct DeferredSums {
  size_t size = 0;
  std::shared_ptr<float[]> values = {};

  // Room for so many, not filled; `spare` where that is enough.
  static std::shared_ptr<DeferredSums> with_room(size_t size, std::shared_ptr<DeferredSums> spare);
};

// A captured one is run again by each replay.
struct StreamCall {
  std::shared_ptr<ExpertLayer::State> layer;
  LayerCall call;  // of the slot's memory
  std::byte* output = nullptr;
  size_t output_bytes = 0;
  std::shared_ptr<CallRing> ring;  // by which the GPU asks for it; null: a host function does
  uint32_t* busy = nullptr;        // in the slot: 1 until the output is there, where the GPU asked
  bool captured = false;
  std::shared_ptr<const DeferredSums> carry;  // to add: what the layer before deferred; or null
  std::shared_ptr<DeferredSums> deferred;     // for the next layer; null: nothing is deferred
  // Input and weights for what is deferred: later work of the stream overwrites the slot's before that ran.
  std::vector<std::byte> kept_input;
  std::vector<float> kept_weights;
  bool failed = false;
  DeferredPairs pairs;
  CpuTeam::Task now, later;
  std::atomic<bool> started = false;  // the stream has given the work to the team
  std::atomic<bool> waited = false;   // the stream has waited for `now`
  bool abandoned = false;             // nobody will make the stream wait
  bool closed = false;                // the stream will wait for what the GPU asked for
  // Of a graph that does not wait for `now`: start() does, or the copies of the next replay would overwrite
  // what is being read. Settled when the capture ends. What the GPU asks for waits by itself.
  bool waits_at_start = false;

  StreamCall();
  StreamCall(const StreamCall&) = delete;
  StreamCall& operator=(const StreamCall&) = delete;

  // Neither the stream nor the team will touch it again.
  bool finished() const noexcept;
  bool can_start() const noexcept;  // tasks of the start before are done
  // Of a graph that is gone: until the team has taken what the GPU asked for, if it did. A GPU that failed may
  // have written no message, which nobody answers, or left a gap before ours: false when that stays for
  // `patience`, and then the team may still come to the call.
  bool wait_for_ring(std::chrono::milliseconds patience = std::chrono::minutes(1)) const noexcept;
  // Keeps nothing that is large, and no layer: the layer is returned, to be destroyed without a lock.
  std::shared_ptr<ExpertLayer::State> rest();

  // For the stream or the ring; the argument is the StreamCall.
  static void start(void* argument) noexcept;
  static void wait(void* argument) noexcept;

 private:
  void run_now() noexcept;
  void run_later() noexcept;
};

}  // namespace kt::inline hybrid
