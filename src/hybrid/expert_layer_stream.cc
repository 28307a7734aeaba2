// A layer's work in the order of a stream. Small calls are posted: the GPU writes them into page-locked
// memory and a message into the team's ring, and later waits for a word there. For large ones, and where a GPU
// cannot do that: copies into page-locked memory, callbacks that hand the work to the team and wait for it,
// the copy of the result.
//
// Memory is of the context (stream_slots.h) or, in a capture, of the capture: replays come back to it. What
// is done is collected by the calls of layers, never by callbacks.
#include <algorithm>
#include <thread>
#include <utility>

#include "base/checked.h"
#include "base/error.h"
#include "base/log.h"
#include "hybrid/streams.h"

namespace kt::inline hybrid {
namespace {

constexpr size_t kMostCarries = 64;  // models times threads, and captures that ended with one

// Bytes of an input that are posted. One block of threads copies them; above it the copy engines are faster.
constexpr size_t kMostPosted = 256 << 10;

const CudaDriver& driver_for(const LayerState& layer) {
  const CudaDriver* const driver = cuda_driver();
  if (!driver)
    fail_as(ErrorKind::kUnsupported, "layer {}: work in a stream needs CUDA, and there is none: {}",
            layer.options.layer, cuda_driver_status());
  return *driver;
}

// Places of a call's parts in a slot.
struct SlotPlan {
  static constexpr size_t kInputAt = 64;  // the word `busy` stands before
  size_t input_bytes, ids_bytes, weights_bytes;
  size_t ids_at, weights_at, output_at, bytes, floats;

  SlotPlan(const LayerState& layer, const LayerCall& call) {
    const auto hidden = static_cast<size_t>(layer.options.shape.hidden);
    const auto tokens = static_cast<size_t>(call.tokens);
    const size_t pairs = checked_mul(tokens, static_cast<size_t>(call.top_k), "routed pairs");
    input_bytes = tokens * hidden * size_of_real(call.input_type);
    ids_bytes = pairs * (call.ids_are_64_bit ? 8 : 4);
    weights_bytes = pairs * sizeof(float);
    ids_at = kInputAt + round_up(input_bytes, size_t{64});
    weights_at = ids_at + round_up(ids_bytes, size_t{64});
    output_at = weights_at + round_up(weights_bytes, size_t{64});
    bytes = output_at + input_bytes;
    floats = layer.options.max_deferred > 0 ? tokens * hidden : 0;
  }

  // Small enough, and in memory that CudaDriver::post() takes.
  bool can_be_posted(const LayerCall& call) const {
    const auto at = [](const void* memory) { return reinterpret_cast<uintptr_t>(memory); };
    return input_bytes <= kMostPosted && (input_bytes | at(call.input)) % 16 == 0 &&
           (at(call.ids) | at(call.weights)) % 4 == 0;
  }
};

void prepare(StreamCall& it, std::shared_ptr<LayerState> layer, const LayerCall& call, const SlotPlan& plan,
             const StreamSlot& slot) {
  std::byte* const base = slot.memory.data();
  it.layer = std::move(layer);
  it.call = call;
  it.call.input = base + SlotPlan::kInputAt;
  it.call.ids = base + plan.ids_at;
  it.call.weights = reinterpret_cast<const float*>(base + plan.weights_at);
  it.output = base + plan.output_at;
  it.output_bytes = plan.input_bytes;
  it.busy = reinterpret_cast<uint32_t*>(base);
  if (plan.floats) it.kept_input.resize(plan.input_bytes);
  if (plan.floats) it.kept_weights.resize(plan.weights_bytes / sizeof(float));
  it.now.ticket = it.later.ticket = 0;  // the last use may have been another team's
  it.abandoned = it.closed = false;
  it.started.store(false, std::memory_order_relaxed);
  it.waited.store(false, std::memory_order_relaxed);
}

// Takes what the layer before deferred, or drops it, and leaves what this one defers.
void hand_on(Streams& all, StreamCall& it, size_t floats, uint64_t capture) {
  const LayerState& layer = *it.layer;
  std::shared_ptr<DeferredSums> taken, spare;
  if (const auto carry = all.carry_of(layer, capture); carry != all.carries.end()) {
    if (carry->layer < layer.options.layer && carry->tokens == it.call.tokens) {
      taken = std::move(carry->sums);
      spare = std::move(carry->spare);
    } else {
      warn_of_dropped(carry->layer);
    }
    all.carries.erase(carry);
  }
  it.carry = taken;
  if (floats == 0) return;
  it.deferred = DeferredSums::with_room(floats, std::move(spare));
  if (all.carries.size() >= kMostCarries) all.carries.erase(all.carries.begin());
  all.carries.push_back({.capture = capture,
                         .thread = std::this_thread::get_id(),
                         .team = layer.team.get(),
                         .model = layer.model_slot.model(),
                         .layer = layer.options.layer,
                         .tokens = it.call.tokens,
                         .sums = it.deferred,
                         .spare = std::move(taken)});
}

// A call on its way into the stream. Unless it is kept, its slot is marked where copies may be on their way.
class Launch {
 public:
  Launch(StreamSlots& slots, StreamSlot& slot, CudaStream stream)
      : slots_(slots), slot_(slot), stream_(stream) {}
  ~Launch() {
    if (!kept_) slots_.mark(slot_, stream_);
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  void keep() { kept_ = true; }

 private:
  StreamSlots& slots_;
  StreamSlot& slot_;
  CudaStream stream_;
  bool kept_ = false;
};

// Input, ids and weights into the slot, and word to the team. The stream may be done with it before this
// returns.
void hand_over(const CudaDriver& driver, StreamCall& it, const LayerCall& call, const SlotPlan& plan,
               CudaStream stream) {
  const CudaPiece input{const_cast<void*>(it.call.input), call.input, plan.input_bytes};
  const CudaPiece ids{const_cast<void*>(it.call.ids), call.ids, plan.ids_bytes};
  const CudaPiece weights{const_cast<float*>(it.call.weights), call.weights, plan.weights_bytes};
  if (const std::shared_ptr<CallRing> ring = it.ring) {
    const std::shared_ptr<CpuTeam> team = it.layer->team;
    ring->expect(1);
    try {
      driver.post(it.busy, input, ids, weights, ring->cuda(), reinterpret_cast<uintptr_t>(&it), stream);
    } catch (...) {
      ring->expect(-1);
      throw;
    }
    return team->nudge();
  }
  for (const CudaPiece& piece : {input, ids, weights}) driver.copy(piece.to, piece.from, piece.bytes, stream);
  driver.call(&StreamCall::start, &it, stream);
}

// Hands the call to the stream. Known before that: afterwards nothing may fail.
void enqueue_start(const CudaDriver& driver, CaptureScope& scope, std::unique_ptr<StreamCall> made,
                   OpenCall open, const LayerCall& call, const SlotPlan& plan) {
  StreamCall& it = *made;
  const CudaStream stream = open.stream;
  const bool captures = scope.key.capture != 0;
  if (captures) scope.captured.push_back(std::move(made));
  try {
    {
      const LockedStreams locked;
      Streams& all = locked.get();
      all.open.reserve(all.open.size() + 1);
      if (!captures) all.in_flight.push_back({std::move(made)});
      all.open.push_back(std::move(open));
      hand_on(all, it, plan.floats, scope.key.capture);
    }
    hand_over(driver, it, call, plan, stream);
  } catch (...) {
    const LockedStreams locked;
    Streams& all = locked.get();
    std::erase_if(all.open, [&](const OpenCall& other) { return other.it == &it; });
    // What would never be written is not handed on.
    if (it.deferred)
      std::erase_if(all.carries, [&](const StreamCarry& carry) { return carry.sums == it.deferred; });
    if (captures)
      scope.captured.pop_back();
    else
      std::erase_if(all.in_flight, [&](const InFlight& other) { return other.it.get() == &it; });
    throw;
  }
}

// The stream waits for the work and, with an output, copies the result; then the slot may be used again. The
// call may be finished, collected and used again as soon as the stream has what waits for it.
void enqueue_end(const CudaDriver& driver, CaptureScope& scope, const OpenCall& open, void* output) {
  const auto same = [&](const OpenCall& other) { return other.it == open.it; };
  const CudaPiece result{output, open.it->output, open.it->output_bytes};
  const bool posted = open.it->ring != nullptr;
  const bool fetched = posted && output && reinterpret_cast<uintptr_t>(output) % 16 == 0;
  // Of a captured call, which no callback reads before a replay.
  const bool waits_at_start = open.it->waits_at_start;
  if (waits_at_start) open.it->waits_at_start = false;
  {
    const LockedStreams locked;
    std::erase_if(locked.get().open, same);
  }
  try {
    if (posted)
      driver.fetch(open.it->busy, fetched ? result : CudaPiece{}, open.stream);
    else
      driver.call(&StreamCall::wait, open.it, open.stream);
  } catch (...) {
    if (waits_at_start) open.it->waits_at_start = true;
    const LockedStreams locked;
    locked.get().open.push_back(open);
    throw;
  }
  if (posted) {
    const LockedStreams locked;
    open.it->closed = true;
  }
  const Launch mark_at_the_end(scope.slots, *open.slot, open.stream);
  if (output && !fetched) driver.copy(output, result.from, result.bytes, open.stream);
}

// What this layer has open in the stream; its `it` is null where there is nothing.
OpenCall open_call(const LayerState& layer, const CaptureScope& scope, CudaStream stream) {
  const LockedStreams locked;
  Streams& all = locked.get();
  const auto open = all.open_call(layer, scope, StreamId(stream));
  return open == all.open.end() ? OpenCall{} : *open;
}

}  // namespace

namespace {

using EndOfGraph = std::shared_ptr<std::atomic<bool>>;

void graph_ended(void* argument) noexcept {
  const std::unique_ptr<EndOfGraph> ended(static_cast<EndOfGraph*>(argument));
  (*ended)->store(true, std::memory_order_release);
}

// So that release_buffers() knows. Where the driver does not tell, the graph's buffers stay for good.
void watch_graph(const CudaDriver& driver, CaptureScope& scope, CudaStream stream) {
  if (scope.graph_ended) return;
  auto for_driver = std::make_unique<EndOfGraph>(std::make_shared<std::atomic<bool>>(false));
  EndOfGraph ended = *for_driver;
  scope.graph_ended = std::move(ended);
  try {
    driver.at_end_of_graph(&graph_ended, for_driver.get(), stream);
    static_cast<void>(for_driver.release());
  } catch (const Error& error) {
    log_once(LogLevel::kWarning, "{}: buffers of captured graphs are not given back", error.what());
  }
}

}  // namespace

void warn_of_dropped(int layer) {
  log_once(LogLevel::kWarning,
           "layer {}: what it deferred is dropped: no later layer of its model came next with as many tokens",
           layer);
}

ExpertLayer::~ExpertLayer() {
  State& s = *state_;
  s.model_slot.leave();
  // In a forked child nobody runs the layer, and a thread that is not there may have the lock.
  if (!s.team->forked()) {
    const std::lock_guard lock(s.mask_mutex);
    if (s.mask) s.own_mask.assign(s.mask, s.mask + s.options.shape.experts);
    if (s.mask) s.mask = s.own_mask.data();
  }
  Layers ended;
  const LockedStreams locked;
  Streams& all = locked.get();
  all.abandon(s);
  all.collect(ended);
}

void ExpertLayer::submit(const LayerCall& call, CudaStream stream) {
  State& s = *state_;
  s.team->check_process();
  s.check_call(call);
  const CudaDriver& driver = driver_for(s);
  s.forwards.rethrow();
  if (call.input_stride != 0 && call.input_stride != s.options.shape.hidden)
    fail("layer {}: rows of the input are {} apart; in a stream they stand without gaps, {}", s.options.layer,
         call.input_stride, s.options.shape.hidden);
  if (call.tokens == 0) return;
  Layers ended;
  const StreamContext within(stream);
  const uint64_t capture = driver.capture(stream);
  const LockedScope scope({driver.context(), capture});
  if (capture) watch_graph(driver, *scope, stream);
  if (const OpenCall open = open_call(s, *scope, stream); open.it) enqueue_end(driver, *scope, open, nullptr);
  std::unique_ptr<StreamCall> made = LockedStreams().get().idle_call(capture != 0, ended);
  const SlotPlan plan(s, call);
  StreamSlot& slot = scope->slots.take(plan.bytes, stream);
  Launch launch(scope->slots, slot, stream);
  StreamCall& it = *made;
  prepare(it, state_, call, plan, slot);
  it.captured = capture != 0;
  it.ring = plan.can_be_posted(call) && driver.posts() ? ring_of(s.team, scope->key.context) : nullptr;
  it.waits_at_start = it.captured && !it.ring;
  enqueue_start(driver, *scope, std::move(made), {scope.shared(), stream, StreamId(stream), &it, &slot}, call,
                plan);
  launch.keep();
}

void ExpertLayer::sync(void* output, int tokens, CudaStream stream) {
  State& s = *state_;
  s.team->check_process();
  const CudaDriver& driver = driver_for(s);
  if (tokens == 0) return s.forwards.rethrow();
  {
    const StreamContext within(stream);
    const uint64_t capture = driver.capture(stream);
    const LockedScope scope({driver.context(), capture});
    const OpenCall open = open_call(s, *scope, stream);
    if (!open.it)
      fail("layer {}: nothing was submitted on this stream, or in this capture, that is still to be synced",
           s.options.layer);
    if (tokens != open.it->call.tokens)
      fail("layer {}: {} tokens were submitted, the result of {} is asked for", s.options.layer,
           open.it->call.tokens, tokens);
    if (!output) fail("layer {}: a null address for the output", s.options.layer);
    enqueue_end(driver, *scope, open, output);
  }
  s.forwards.rethrow();
}

namespace {

// What is to be destroyed without a lock.
struct Released {
  Layers ended;
  std::vector<std::unique_ptr<StreamCall>> captured, idle;
  std::vector<std::unique_ptr<StreamSlot>> slots;
  std::vector<std::shared_ptr<CaptureScope>> scopes;
};

// False for a capture whose graph may be replayed: that keeps all it has.
bool release(const std::shared_ptr<CaptureScope>& shared, Released& released) {
  const LockedScope scope(shared);
  if (scope->may_be_replayed()) return false;
  for (auto& slot : scope->slots.give_back()) released.slots.push_back(std::move(slot));
  if (!scope->key.capture) return true;
  for (auto& it : scope->captured) released.captured.push_back(std::move(it));
  scope->captured.clear();
  scope->gone = true;
  const LockedStreams locked;
  Streams& all = locked.get();
  std::erase_if(all.open, [&](const OpenCall& open) { return open.scope == shared; });
  std::erase_if(all.carries, [&](const StreamCarry& carry) { return carry.capture == scope->key.capture; });
  all.scopes.erase(scope->key);
  return true;
}

// To the end of the process: what was to be released may still be used, as a call of the layer never comes.
[[noreturn]] void leave(Released& released, int layer) {
  static_cast<void>(std::make_unique<Released>(std::move(released)).release());
  fail_as(
      ErrorKind::kInternal,
      "layer {}: a GPU handed a call over and failed before an earlier one: the team never comes to it, and "
      "buffers of graphs that are gone are not given back",
      layer);
}

}  // namespace

std::vector<uint64_t> release_buffers() {
  Released released;
  std::vector<uint64_t> held;
  {
    const LockedStreams locked;
    Streams& all = locked.get();
    all.collect(released.ended);
    released.idle.swap(all.idle);
    std::erase_if(all.carries,
                  [&](const StreamCarry& carry) { return carry.capture == 0 && all.in_flight.empty(); });
    for (const auto& [key, scope] : all.scopes) released.scopes.push_back(scope);
  }
  for (const std::shared_ptr<CaptureScope>& scope : released.scopes)
    if (!release(scope, released)) held.push_back(scope->key.capture);
  for (const std::unique_ptr<StreamCall>& it : released.captured)
    if (!it->wait_for_ring()) leave(released, it->layer->options.layer);
  for (const std::unique_ptr<StreamCall>& it : released.captured) {
    it->layer->team->wait(std::max(it->now.ticket, it->later.ticket));
    if (it->ring) it->ring->expect(-1);
  }
  return held;
}

size_t held_buffer_bytes() {
  const LockedStreams locked;
  size_t sum = 0;
  for (const auto& [key, scope] : locked.get().scopes) sum += scope->slots.bytes();
  return sum;
}

}  // namespace kt::inline hybrid
