#include <utility>

#include "cuda/driver.h"

namespace kt::inline cuda {

StreamMark::~StreamMark() {
  if (event_) cuda_driver()->end_event(event_);
}

StreamMark::StreamMark(StreamMark&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}

StreamMark& StreamMark::operator=(StreamMark&& other) noexcept {
  StreamMark taken(std::move(other));
  std::swap(event_, taken.event_);
  return *this;
}

void StreamMark::set(CudaStream stream) {
  if (!event_) event_ = cuda_driver()->make_event();
  cuda_driver()->record(event_, stream);
}

bool StreamMark::passed() const { return !event_ || cuda_driver()->passed(event_); }

void StreamMark::hold(CudaStream stream) const {
  if (event_) cuda_driver()->hold(stream, event_);
}

}  // namespace kt::inline cuda
