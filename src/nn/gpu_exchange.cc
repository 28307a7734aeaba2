#include "nn/gpu_exchange.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "base/park.h"

namespace kt::inline nn {
namespace {

constexpr std::chrono::milliseconds kLook{1};  // for the other side's end, while waiting

size_t floats(int64_t count) { return static_cast<size_t>(count) * sizeof(float); }

// Of ids: those of one large step, or of all layers of a replayed one.
int64_t most_ids(const GpuExchange::Sizes& sizes) {
  return std::max(sizes.tokens, sizes.layers * sizes.step_tokens) * sizes.top_k;
}

}  // namespace

size_t GpuExchange::host_bytes(const Sizes& sizes) {
  return floats(2 * sizes.tokens * sizes.width + most_ids(sizes) + sizes.tokens * sizes.top_k);
}

void GpuExchange::allocate(const std::shared_ptr<const Gpu>& gpu, const Sizes& sizes) {
  sizes_ = sizes;
  rows_ = pinned_for(*gpu, floats(sizes.tokens * sizes.width));
  out_ = pinned_for(*gpu, floats(sizes.tokens * sizes.width));
  ids_ = pinned_for(*gpu, floats(most_ids(sizes)));
  weights_ = pinned_for(*gpu, floats(sizes.tokens * sizes.top_k));
  if (words_.size() > 0) return;
  words_ = pinned_for(*gpu, 3 * kWordsApart * sizeof(uint32_t));
  const uint32_t zeros[6] = {};
  counters_ = DeviceBuffer(gpu, sizeof zeros, "words of a step");
  GpuStream stream(gpu);
  stream.copy(counters_.at(), zeros, sizeof zeros);
  stream.wait();
}

uint32_t GpuExchange::next_step() {
  number_ = (number_ + 1) % kStepNumbers;
  seen_ = 0;
  posted().store(0, std::memory_order_relaxed);
  done().store(0, std::memory_order_relaxed);
  return number_;
}

PostRowsArgs GpuExchange::post(const StepWords* step, int layer, int64_t ids_of) const {
  return {.step = step,
          .layer = layer,
          .to_x = at<float>(rows_),
          .to_ids = const_cast<int32_t*>(ids(ids_of)),
          .to_weights = at<float>(weights_),
          .posted = at<uint32_t>(words_),
          .arrived = counters_.as<uint32_t>(),
          .cold = counters_.as<uint32_t>() + 2};
}

FetchedRows GpuExchange::fetched(const StepWords* step, int layer) const {
  return {.step = step,
          .done = at<uint32_t>(words_) + kWordsApart,
          .cold = counters_.as<uint32_t>() + 2,
          .rows = out(),
          .waited = counters_.as<uint64_t>() + 2,
          .told = at<uint64_t>(words_) + kWordsApart,  // as many bytes as two lines of words
          .layer = layer};
}

EndStepArgs GpuExchange::end(const StepWords* step) const {
  return {.step = step, .posted = at<uint32_t>(words_)};
}

int GpuExchange::wait(GpuStream& stream) {
  const auto fresh = [&] { return posted().load(std::memory_order_acquire) != seen_; };
  while (!spin_until(fresh, kLook, Spin::kYields)) {
    if (!stream.done() || fresh()) continue;
    fail_as(ErrorKind::kInternal, "the GPU ended step {} without asking for what comes next", number_);
  }
  seen_ = posted().load(std::memory_order_acquire);
  const int layer = static_cast<int>(seen_ & ((1u << kLayerBits) - 1)) - 1;
  if (seen_ != exchange_word(number_, layer))
    fail_as(ErrorKind::kInternal, "the GPU speaks of step {}, this is {}", seen_ >> kLayerBits, number_);
  return layer;
}

std::chrono::nanoseconds GpuExchange::waited() {
  const uint64_t all = std::atomic_ref(*(at<uint64_t>(words_) + kWordsApart)).load(std::memory_order_relaxed);
  return std::chrono::nanoseconds(all - std::exchange(told_, all));
}

void GpuExchange::answer(int layer) {
  done().store(exchange_word(number_, layer), std::memory_order_release);
}

void GpuExchange::give_up() { done().store(kGiveUp, std::memory_order_release); }

}  // namespace kt::inline nn
