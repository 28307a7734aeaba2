#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "cuda/driver.h"

namespace kt::inline cuda {
namespace {

constexpr size_t kAlignment = 64;

void* ordinary(size_t bytes) {
  void* const memory =
      bytes <= SIZE_MAX - kAlignment
          ? std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment)
          : nullptr;
  if (!memory) fail_as(ErrorKind::kMemory, "{} for a buffer are not to be had", human_bytes(bytes));
  return memory;
}

}  // namespace

PinnedBuffer::PinnedBuffer(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  const CudaDriver* const driver = cuda_driver();
  pinned_ = driver != nullptr;
  data_ = static_cast<std::byte*>(driver ? driver->pin(bytes) : ordinary(bytes));
  std::memset(data_, 0, bytes);
}

PinnedBuffer::~PinnedBuffer() {
  if (pinned_)
    cuda_driver()->unpin(data_);
  else
    std::free(data_);
}

PinnedBuffer::PinnedBuffer(PinnedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      pinned_(std::exchange(other.pinned_, false)) {}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  PinnedBuffer taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(size_, taken.size_);
  std::swap(pinned_, taken.pinned_);
  return *this;
}

}  // namespace kt::inline cuda
