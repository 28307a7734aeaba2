#include "hybrid/stream_slots.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "base/log.h"

namespace kt::inline hybrid {
namespace {

using State = StreamSlot::State;

constexpr uintptr_t kLegacyStream = 1, kThreadStream = 2;

uint64_t number_of_thread() {
  static std::atomic<uint64_t> last = 0;
  thread_local const uint64_t mine = ++last;
  return mine;
}

}  // namespace

StreamId::StreamId(CudaStream handle) : handle_(reinterpret_cast<uintptr_t>(handle)) {
  if (handle_ == kLegacyStream) handle_ = 0;
  if (handle_ == kThreadStream) thread_ = number_of_thread();
}

// The slot that this stream used before: its own order keeps the uses apart. The smallest that is enough, so
// that a large one is there for a large call.
StreamSlot* StreamSlots::in_order(size_t bytes, CudaStream handle) {
  const StreamId stream(handle);
  StreamSlot* best = nullptr;
  for (const auto& slot : slots_) {
    if (slot->state != State::kMarked || slot->stream != stream || slot->memory.size() < bytes) continue;
    if (!best || slot->memory.size() < best->memory.size()) best = slot.get();
  }
  // A stream may have ended and another one got its handle.
  if (best && kind_ == Kind::kEager) best->end.hold(handle);
  return best;
}

StreamSlot* StreamSlots::passed(size_t bytes) {
  StreamSlot* best = nullptr;
  for (const auto& slot : slots_) {
    if (slot->memory.size() < bytes || (best && slot->memory.size() >= best->memory.size())) continue;
    if (slot->state == State::kMarked && kind_ == Kind::kEager && slot->end.passed()) free(*slot);
    if (slot->state == State::kFree) best = slot.get();
  }
  return best;
}

StreamSlot* StreamSlots::oldest(size_t bytes) {
  StreamSlot* best = nullptr;
  for (const auto& slot : slots_)
    if (slot->state == State::kMarked && slot->memory.size() >= bytes && (!best || slot->use < best->use))
      best = slot.get();
  return best;
}

bool StreamSlots::may_grow(size_t bytes) const {
  const auto large =
      std::ranges::count_if(slots_, [&](const auto& slot) { return slot->memory.size() >= bytes; });
  if (kind_ == Kind::kCaptured) return large < ptrdiff_t{kOwnSlots};
  return large < 2 || this->bytes() + bytes <= most_bytes_;
}

StreamSlot& StreamSlots::grow(size_t bytes) {
  auto made = std::make_unique<StreamSlot>();
  made->memory = PinnedBuffer(bytes);
  slots_.push_back(std::move(made));
  bytes_ += bytes;
  return *slots_.back();
}

StreamSlot& StreamSlots::take(size_t bytes, CudaStream stream) {
  if (lost_ >= kMostLost)
    fail_as(
        ErrorKind::kInternal,
        "CUDA could not mark the end of {} uses of locked memory, which is lost; release_buffers() gives it "
        "back when no work is in flight",
        lost_);
  const size_t wanted = std::bit_ceil(std::max(bytes, kSmallest));
  StreamSlot* slot = in_order(bytes, stream);
  if (!slot) slot = passed(bytes);
  if (!slot && !may_grow(wanted)) {
    slot = oldest(bytes);
    if (slot) slot->end.hold(stream);
  }
  if (!slot) slot = &grow(wanted);
  slot->state = State::kOpen;
  slot->stream = StreamId(stream);
  slot->use = ++uses_;
  return *slot;
}

void StreamSlots::mark(StreamSlot& slot, CudaStream stream) noexcept {
  slot.state = State::kLost;
  try {
    slot.end.set(stream);
    slot.state = State::kMarked;
    slot.stream = StreamId(stream);
  } catch (const std::exception& error) {
    ++lost_;
    log_line(LogLevel::kWarning, text("{}: {} of locked memory are not used again", error.what(),
                                      human_bytes(slot.memory.size())));
  }
}

std::vector<std::unique_ptr<StreamSlot>> StreamSlots::give_back() {
  std::vector<std::unique_ptr<StreamSlot>> given;
  if (kind_ != Kind::kEager) return given;
  given.reserve(slots_.size());
  for (size_t i = 0; i < slots_.size();) {
    const StreamSlot& slot = *slots_[i];
    if (slot.state == State::kOpen || (slot.state == State::kMarked && !slot.end.passed())) {
      ++i;
      continue;
    }
    if (slot.state == State::kLost) --lost_;
    bytes_ -= slot.memory.size();
    given.push_back(std::move(slots_[i]));
    slots_[i] = std::move(slots_.back());
    slots_.pop_back();
  }
  return given;
}

}  // namespace kt::inline hybrid
