// A layer's work in the order of a stream: buffers that copies go to, callbacks that hand the work to the
// team and wait for it.
//
// Each stream, and each stream of a capture, has a lane: a few slots of page-locked memory that all layers
// share. A slot is used again once the result of its last use was asked for in the same lane: the stream's
// own order then keeps the copies apart. Where work was put off, the team still writes the slot's deferred
// sums after that; the result of any later use of the lane says that it is done, because the team works in
// order.
//
// Callbacks run on the driver's threads. They take no lock that is held while the driver is called, and give
// nothing back: what is done is collected by the calls of layers.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/checked.h"
#include "base/error.h"
#include "hybrid/expert_layer_state.h"

namespace kt {
namespace {

using LayerState = ExpertLayer::State;

constexpr size_t kSmallestSlot = 64 << 10;  // bytes
constexpr size_t kMostCarries = 64;         // models times threads, and captures that ended with one

// One submit, as the stream's callbacks see it; a captured one is run again by each replay.
struct StreamCall {
  std::shared_ptr<LayerState> layer;
  LayerCall call;  // of the slot's memory
  std::byte* output = nullptr;
  size_t output_bytes = 0;
  const float* carry = nullptr;  // [tokens, hidden], to add: what the layer before put off
  float* deferred = nullptr;     // [tokens, hidden], for the next layer; null: nothing is put off
  // Input and weights for what is put off: a replay overwrites the slot's before that ran.
  std::vector<std::byte> kept_input;
  std::vector<float> kept_weights;
  bool failed = false;
  DeferredPairs pairs;
  CpuTeam::Task now, later;
  std::atomic<bool> waited = false;  // the stream has waited for `now` and will not touch this again

  StreamCall() {
    now.run = [this] { run_now(); };
    later.run = [this] { run_later(); };
  }
  StreamCall(const StreamCall&) = delete;
  StreamCall& operator=(const StreamCall&) = delete;

  void run_now() noexcept {
    failed = false;
    try {
      if (deferred) {
        std::memcpy(kept_input.data(), call.input, kept_input.size());
        std::copy_n(call.weights, kept_weights.size(), kept_weights.begin());
      }
      layer->run(call, output, carry, deferred ? &pairs : nullptr);
    } catch (...) {
      failed = true;
      std::memset(output, 0, output_bytes);
      layer->keep_error(std::current_exception());
    }
  }

  void run_later() noexcept {
    try {
      LayerCall again = call;
      again.input = kept_input.data();
      again.weights = kept_weights.data();
      if (!failed) return layer->run_deferred(again, pairs, deferred);
    } catch (...) {
      layer->keep_error(std::current_exception());
    }
    std::fill_n(deferred, int64_t{call.tokens} * layer->options.shape.hidden, 0.0f);
  }

  bool finished() const noexcept {
    return waited.load(std::memory_order_acquire) && (!deferred || layer->team->done(later.ticket));
  }
};

void start_work(void* argument) noexcept {
  StreamCall& it = *static_cast<StreamCall*>(argument);
  CpuTeam& team = *it.layer->team;
  // Of the replay before: when no layer came after this one, or when nobody asked for its result.
  if (!team.done(it.now.ticket)) team.wait(it.now.ticket);
  if (!team.done(it.later.ticket)) team.wait(it.later.ticket);
  team.submit(it.now);
  if (it.deferred) team.submit(it.later);
}

void wait_for_work(void* argument) noexcept {
  StreamCall& it = *static_cast<StreamCall*>(argument);
  it.layer->team->wait(it.now.ticket);
  it.waited.store(true, std::memory_order_release);
}

struct Slot {
  PinnedBuffer memory;          // input, ids, weights, output of the call that uses it
  std::vector<float> deferred;  // what that call puts off
  uint64_t submission = 0;      // the last use
  bool synced = true;           // its result was asked for
};

// A submit whose result was not asked for yet.
struct OpenCall {
  StreamCall* it = nullptr;
  Slot* slot = nullptr;
};

// What the last layer of a model put off, for its next one, which may be on another stream of the same
// capture or the same thread. The slot is its lane's.
struct StreamCarry {
  uint64_t capture = 0;
  std::thread::id thread;  // that submitted; of no matter in a capture
  const CpuTeam* team = nullptr;
  std::string weights;
  int hidden = 0, layer = 0, tokens = 0;
  Slot* slot = nullptr;
};

struct Lane {
  std::vector<std::unique_ptr<Slot>> slots;
  std::vector<OpenCall> open;
  uint64_t submissions = 0, last_synced = 0;

  // Room for so many bytes and floats that nothing enqueued before will touch once later work of this lane
  // runs.
  Slot& slot_for(size_t bytes, size_t floats, const std::vector<StreamCarry>& carries) {
    Slot* best = nullptr;
    for (const std::unique_ptr<Slot>& slot : slots) {
      const bool kept = std::any_of(carries.begin(), carries.end(),
                                    [&](const StreamCarry& carry) { return carry.slot == slot.get(); });
      const bool read_later = !slot->deferred.empty() && last_synced <= slot->submission;
      if (!slot->synced || kept || (slot->submission > 0 && read_later)) continue;
      if (slot->memory.size() < bytes || slot->deferred.size() < floats) continue;
      if (!best || slot->memory.size() < best->memory.size()) best = slot.get();
    }
    if (best) return *best;
    auto made = std::make_unique<Slot>();
    made->memory = PinnedBuffer(std::bit_ceil(std::max(bytes, kSmallestSlot)));
    made->deferred.resize(floats ? std::bit_ceil(floats) : 0);
    slots.push_back(std::move(made));
    return *slots.back();
  }
};

struct LaneKey {
  uint64_t capture = 0;
  const void* context = nullptr;  // every device has a null stream
  CudaStream stream = nullptr;
  auto operator<=>(const LaneKey&) const = default;
};

struct Lanes {
  std::mutex mutex;
  std::map<LaneKey, Lane> lanes;
  std::vector<StreamCarry> carries;
  std::vector<std::unique_ptr<StreamCall>> captured;  // until release_buffers()
  std::vector<std::unique_ptr<StreamCall>> flying, idle;

  std::vector<StreamCarry>::iterator carry_of(const LayerState& layer, uint64_t capture) {
    return std::find_if(carries.begin(), carries.end(), [&](const StreamCarry& carry) {
      return carry.capture == capture && (capture || carry.thread == std::this_thread::get_id()) &&
             carry.team == layer.team.get() && carry.hidden == layer.options.shape.hidden &&
             carry.weights == layer.options.weights;
    });
  }

  // Layers that only finished work still held are added to `ended`, to be destroyed without the lock.
  void collect(std::vector<std::shared_ptr<LayerState>>& ended) {
    for (size_t i = 0; i < flying.size();) {
      if (!flying[i]->finished()) {
        ++i;
        continue;
      }
      ended.push_back(std::move(flying[i]->layer));
      idle.push_back(std::move(flying[i]));
      flying[i] = std::move(flying.back());
      flying.pop_back();
    }
  }

  // Not yet among `flying` or `captured`.
  std::unique_ptr<StreamCall> idle_call(bool captures, std::vector<std::shared_ptr<LayerState>>& ended) {
    if (captures) return std::make_unique<StreamCall>();
    if (idle.empty()) collect(ended);
    if (idle.empty()) return std::make_unique<StreamCall>();
    std::unique_ptr<StreamCall> it = std::move(idle.back());
    idle.pop_back();
    return it;
  }
};

// Never destroyed: at the end of the process streams may still be at work.
Lanes& lanes() {
  static Lanes& all = *std::make_unique<Lanes>().release();
  return all;
}

const CudaDriver& driver_for(const LayerState& layer) {
  const CudaDriver* const driver = cuda_driver();
  if (!driver)
    fail_as(ErrorKind::kUnsupported, "layer {}: work in a stream needs CUDA, and there is none: {}",
            layer.options.layer, cuda_driver_status());
  return *driver;
}

// The stream waits for the work; from here on its slot may be used again.
void enqueue_wait(const CudaDriver& driver, Lane& lane, const OpenCall& open, CudaStream stream) {
  driver.call(wait_for_work, open.it, stream);
  open.slot->synced = true;
  lane.last_synced = std::max(lane.last_synced, open.slot->submission);
}

std::vector<OpenCall>::iterator open_call_of(Lane& lane, const LayerState& layer) {
  return std::find_if(lane.open.begin(), lane.open.end(),
                      [&](const OpenCall& open) { return open.it->layer.get() == &layer; });
}

// Places of a call's parts in a slot.
struct SlotPlan {
  size_t input_bytes, ids_bytes, weights_bytes;
  size_t ids_at, weights_at, output_at, bytes, floats;

  SlotPlan(const LayerState& layer, const LayerCall& call) {
    const auto hidden = static_cast<size_t>(layer.options.shape.hidden);
    const auto tokens = static_cast<size_t>(call.tokens);
    const size_t pairs = checked_mul(tokens, static_cast<size_t>(call.top_k), "routed pairs");
    input_bytes = tokens * hidden * size_of_real(call.input_type);
    ids_bytes = pairs * (call.ids_are_64_bit ? 8 : 4);
    weights_bytes = pairs * sizeof(float);
    ids_at = round_up(input_bytes, size_t{64});
    weights_at = ids_at + round_up(ids_bytes, size_t{64});
    output_at = weights_at + round_up(weights_bytes, size_t{64});
    bytes = output_at + input_bytes;
    floats = layer.options.max_deferred > 0 ? tokens * hidden : 0;
  }
};

void prepare(StreamCall& it, std::shared_ptr<LayerState> layer, const LayerCall& call, const SlotPlan& plan,
             Slot& slot) {
  std::byte* const base = slot.memory.data();
  it.layer = std::move(layer);
  it.call = call;
  it.call.input = base;
  it.call.ids = base + plan.ids_at;
  it.call.weights = reinterpret_cast<const float*>(base + plan.weights_at);
  it.output = base + plan.output_at;
  it.output_bytes = plan.input_bytes;
  it.deferred = plan.floats ? slot.deferred.data() : nullptr;
  if (it.deferred) it.kept_input.resize(plan.input_bytes);
  if (it.deferred) it.kept_weights.resize(plan.weights_bytes / sizeof(float));
  it.carry = nullptr;
  it.now.ticket = it.later.ticket = 0;  // the last use may have been another team's
  it.waited.store(false, std::memory_order_relaxed);
}

// Takes what the layer before put off, or drops it, and leaves what this one puts off.
void hand_on(Lanes& all, StreamCall& it, Slot& slot, uint64_t capture) {
  const ExpertLayerOptions& options = it.layer->options;
  if (const auto carry = all.carry_of(*it.layer, capture); carry != all.carries.end()) {
    if (carry->layer < options.layer && carry->tokens == it.call.tokens)
      it.carry = carry->slot->deferred.data();
    all.carries.erase(carry);
  }
  if (!it.deferred) return;
  if (all.carries.size() >= kMostCarries) all.carries.erase(all.carries.begin());
  all.carries.push_back({.capture = capture,
                         .thread = std::this_thread::get_id(),
                         .team = it.layer->team.get(),
                         .weights = options.weights,
                         .hidden = options.shape.hidden,
                         .layer = options.layer,
                         .tokens = it.call.tokens,
                         .slot = &slot});
}

}  // namespace

ExpertLayer::~ExpertLayer() {
  State& s = *state_;
  {
    const std::lock_guard lock(s.mask_mutex);
    if (s.mask) s.own_mask.assign(s.mask, s.mask + s.options.shape.experts);
    if (s.mask) s.mask = s.own_mask.data();
  }
  std::vector<std::shared_ptr<State>> ended;
  const std::lock_guard lock(lanes().mutex);
  lanes().collect(ended);
}

void ExpertLayer::submit(const LayerCall& call, CudaStream stream) {
  State& s = *state_;
  s.team->check_process();
  s.check_call(call);
  const CudaDriver& driver = driver_for(s);
  s.throw_error();
  if (call.input_stride != 0 && call.input_stride != s.options.shape.hidden)
    fail("layer {}: rows of the input are {} apart; in a stream they stand without gaps, {}", s.options.layer,
         call.input_stride, s.options.shape.hidden);
  if (call.tokens == 0) return;
  std::vector<std::shared_ptr<State>> ended;
  Lanes& all = lanes();
  const std::lock_guard lock(all.mutex);
  const uint64_t capture = driver.capture(stream);
  Lane& lane = all.lanes[{capture, driver.context(), stream}];
  if (const auto open = open_call_of(lane, s); open != lane.open.end()) {
    enqueue_wait(driver, lane, *open, stream);
    lane.open.erase(open);
  }
  const SlotPlan plan(s, call);
  Slot& slot = lane.slot_for(plan.bytes, plan.floats, all.carries);
  std::unique_ptr<StreamCall> made = all.idle_call(capture != 0, ended);
  StreamCall& it = *made;
  prepare(it, state_, call, plan, slot);
  driver.copy(slot.memory.data(), call.input, plan.input_bytes, stream);
  driver.copy(slot.memory.data() + plan.ids_at, call.ids, plan.ids_bytes, stream);
  driver.copy(slot.memory.data() + plan.weights_at, call.weights, plan.weights_bytes, stream);
  hand_on(all, it, slot, capture);
  lane.open.reserve(lane.open.size() + 1);
  (capture ? all.captured : all.flying).push_back(std::move(made));
  slot.submission = ++lane.submissions;
  slot.synced = false;
  lane.open.push_back({&it, &slot});
  driver.call(start_work, &it, stream);
}

void ExpertLayer::sync(void* output, int tokens, CudaStream stream) {
  State& s = *state_;
  s.team->check_process();
  const CudaDriver& driver = driver_for(s);
  if (tokens == 0) return s.throw_error();
  {
    Lanes& all = lanes();
    const std::lock_guard lock(all.mutex);
    const auto lane = all.lanes.find({driver.capture(stream), driver.context(), stream});
    const auto open =
        lane == all.lanes.end() ? std::vector<OpenCall>::iterator() : open_call_of(lane->second, s);
    if (lane == all.lanes.end() || open == lane->second.open.end())
      fail("layer {}: nothing was submitted on this stream, or in this capture, that is still to be synced",
           s.options.layer);
    const StreamCall& it = *open->it;
    if (tokens != it.call.tokens)
      fail("layer {}: {} tokens were submitted, the result of {} is asked for", s.options.layer,
           it.call.tokens, tokens);
    if (!output) fail("layer {}: a null address for the output", s.options.layer);
    std::byte* const from = it.output;
    const size_t bytes = it.output_bytes;
    enqueue_wait(driver, lane->second, *open, stream);
    lane->second.open.erase(open);
    driver.copy(output, from, bytes, stream);
  }
  s.throw_error();
}

void release_buffers() {
  std::vector<std::shared_ptr<ExpertLayer::State>> ended;
  std::vector<std::unique_ptr<StreamCall>> calls;
  std::vector<Lane> gone;
  Lanes& all = lanes();
  const std::lock_guard lock(all.mutex);
  all.collect(ended);
  calls.swap(all.captured);
  for (const std::unique_ptr<StreamCall>& it : calls)
    it->layer->team->wait(std::max(it->now.ticket, it->later.ticket));
  all.idle.clear();
  std::erase_if(all.carries,
                [&](const StreamCarry& carry) { return carry.capture != 0 || all.flying.empty(); });
  // What still runs keeps the buffers of all streams; they are given back by the next call.
  for (auto lane = all.lanes.begin(); lane != all.lanes.end();) {
    const bool keep = lane->first.capture == 0 && !all.flying.empty();
    if (!keep) gone.push_back(std::move(lane->second));
    lane = keep ? std::next(lane) : all.lanes.erase(lane);
  }
}

}  // namespace kt
