// Page-locked memory of calls in streams. The streams of a context share it, and so do the streams of a
// capture, so that an engine with a stream for each layer holds as much as is in flight, not a part for each
// layer. One thread at a time.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/driver.h"

namespace kt::inline hybrid {

// Which stream a handle means: 1 is another word for the null stream, and 2 is the default stream of the
// thread that says it, one for each.
class StreamId {
 public:
  StreamId() = default;
  explicit StreamId(CudaStream handle);
  bool operator==(const StreamId&) const = default;

 private:
  uintptr_t handle_ = 0;
  uint64_t thread_ = 0;  // no other one of this process had or will have the number
};

// One call's input, ids, weights and output.
struct StreamSlot {
  PinnedBuffer memory;
  enum class State {
    kFree,    // nothing in any stream touches it
    kOpen,    // a call has it, and its end is not in the stream yet
    kMarked,  // `end` is behind the last work that touches it
    kLost,    // work touches it whose end could not be marked
  } state = State::kFree;
  StreamId stream;  // of the last use
  StreamMark end;
  uint64_t use = 0;  // counts up
};

class StreamSlots {
 public:
  enum class Kind {
    kEager,  // a slot is used again when its stream has passed it
    // A replay has no host that could look, so a slot is used again in the same stream, or in another one of
    // the capture behind an edge of the graph: after kOwnSlots uses, so that branches which run side by side
    // have room to do so. Slots stay until the end: replays come back to them.
    kCaptured,
  };
  static constexpr size_t kSmallest = 64 << 10;
  // Beyond so many bytes, and two slots of a size, calls wait in their streams for the oldest call that has
  // such a slot.
  static constexpr size_t kEagerBytes = 256 << 20;
  static constexpr size_t kOwnSlots = 4;
  static constexpr size_t kMostLost = 16;

  explicit StreamSlots(Kind kind, size_t most_bytes = kEagerBytes) : kind_(kind), most_bytes_(most_bytes) {}

  // An open slot of at least so many bytes, which the stream may use from here on. Gives nothing back,
  // however small what it has: freeing page-locked memory waits for the device, whose work may wait for the
  // caller.
  StreamSlot& take(size_t bytes, CudaStream stream);
  // The last work that touches the slot is in the stream. Where that cannot be marked the slot is lost until
  // give_back(): never wrong, and rare. After kMostLost, take() throws.
  void mark(StreamSlot& slot, CudaStream stream) noexcept;
  // Nothing touches it: no work was enqueued, or all of it is done.
  static void free(StreamSlot& slot) { slot.state = StreamSlot::State::kFree; }

  size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }  // any thread
  size_t count() const { return slots_.size(); }
  // Eager: what is not in use, for the caller to destroy where waiting for the device does no harm. Lost ones
  // too: only the caller can know that no work is in flight.
  std::vector<std::unique_ptr<StreamSlot>> give_back();

 private:
  StreamSlot* in_order(size_t bytes, CudaStream handle);
  StreamSlot* passed(size_t bytes);
  StreamSlot* oldest(size_t bytes);
  bool may_grow(size_t bytes) const;
  StreamSlot& grow(size_t bytes);

  Kind kind_;
  size_t most_bytes_;
  std::vector<std::unique_ptr<StreamSlot>> slots_;
  std::atomic<size_t> bytes_ = 0;
  size_t lost_ = 0;
  uint64_t uses_ = 0;
};

}  // namespace kt::inline hybrid
