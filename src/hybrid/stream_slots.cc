#include "hybrid/stream_slots.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "base/log.h"

namespace kt {
namespace {

using State = StreamSlot::State;

}  // namespace

// The slot that this stream used before: its own order keeps the uses apart. The smallest that is enough, so
// that a large one is there for a large call.
StreamSlot* StreamSlots::in_order(size_t bytes, CudaStream stream) {
  StreamSlot* best = nullptr;
  for (const auto& slot : slots_) {
    if (slot->state != State::kMarked || slot->stream != stream || slot->memory.size() < bytes) continue;
    if (!best || slot->memory.size() < best->memory.size()) best = slot.get();
  }
  // A stream may have ended and another one got its handle.
  if (best && kind_ == Kind::kEager) best->end.hold(stream);
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
  size_t count = 0, sum = 0;
  for (const auto& slot : slots_) {
    if (slot->memory.size() < bytes) continue;
    ++count;
    sum += slot->memory.size();
  }
  if (kind_ == Kind::kCaptured) return count < kOwnSlots;
  return count < 2 || sum + bytes <= most_bytes_;
}

// What is free is too small, or it would have been taken: where memory is large, it goes first.
StreamSlot& StreamSlots::grow(size_t bytes) {
  const size_t wanted = std::bit_ceil(std::max(bytes, kSmallest));
  if (this->bytes() + wanted > most_bytes_) give_back();
  auto made = std::make_unique<StreamSlot>();
  made->memory = PinnedBuffer(wanted);
  slots_.push_back(std::move(made));
  return *slots_.back();
}

StreamSlot& StreamSlots::take(size_t bytes, CudaStream stream) {
  StreamSlot* slot = in_order(bytes, stream);
  if (!slot) slot = passed(bytes);
  if (!slot && !may_grow(std::bit_ceil(std::max(bytes, kSmallest)))) {
    slot = oldest(bytes);
    if (slot) slot->end.hold(stream);
  }
  if (!slot) slot = &grow(bytes);
  slot->state = State::kOpen;
  slot->stream = stream;
  slot->use = ++uses_;
  return *slot;
}

void StreamSlots::mark(StreamSlot& slot, CudaStream stream) noexcept {
  slot.state = State::kLost;
  try {
    slot.end.set(stream);
    slot.state = State::kMarked;
    slot.stream = stream;
  } catch (const std::exception& error) {
    log_line(LogLevel::kWarning, text("{}: {} of locked memory are not used again", error.what(),
                                      human_bytes(slot.memory.size())));
  }
}

size_t StreamSlots::bytes() const {
  size_t sum = 0;
  for (const auto& slot : slots_) sum += slot->memory.size();
  return sum;
}

void StreamSlots::give_back() {
  if (kind_ != Kind::kEager) return;
  std::erase_if(slots_, [](const auto& slot) {
    return slot->state == State::kFree || (slot->state == State::kMarked && slot->end.passed());
  });
}

}  // namespace kt
