#include "nn/gpu_step.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"

namespace kt {
namespace {

constexpr size_t kLeastPages = 1024;

}  // namespace

int GpuStep::rotation(const RopeSpec& spec) {
  for (size_t i = 0; i < ropes_.size(); ++i)
    if (ropes_[i].spec() == spec) return static_cast<int>(i);
  ropes_.emplace_back(spec);
  return static_cast<int>(ropes_.size()) - 1;
}

int64_t GpuStep::width() const {
  int64_t sum = 3;  // position, first page, factor
  for (const Rope& rope : ropes_) sum += rope.spec().dims;
  return sum;
}

void GpuStep::allocate(std::shared_ptr<const Gpu> gpu, int max_tokens) {
  gpu_ = std::move(gpu);
  max_tokens_ = max_tokens;
  angles_at_.clear();
  int64_t at = int64_t{3} * max_tokens;
  for (const Rope& rope : ropes_) {
    angles_at_.push_back(at);
    at += int64_t{rope.spec().dims} * max_tokens;
  }
  reserve(kLeastPages);
}

void GpuStep::reserve(size_t pages) {
  if (pages <= pages_ && device_.size() > 0) return;
  pages_ = pages;
  const size_t bytes =
      (static_cast<size_t>(width()) * static_cast<size_t>(max_tokens_) + pages) * sizeof(float);
  host_ = PinnedBuffer(bytes);
  device_ = DeviceBuffer(gpu_, bytes, "tables of a step");
}

void GpuStep::send(std::span<const AttentionSequence> sequences, int tokens, GpuStream& stream) {
  tokens_ = tokens;
  size_t pages = 0;
  for (const AttentionSequence& sequence : sequences)
    pages += static_cast<size_t>(ceil_div(sequence.position + sequence.count, kPageTokens));
  reserve(std::max(kLeastPages, pages));
  auto* const ints = reinterpret_cast<int32_t*>(host_.data());
  auto* const floats = reinterpret_cast<float*>(host_.data());
  int32_t* const first_pages = ints + max_tokens_;
  int32_t* const tables = ints + width() * max_tokens_;
  int32_t at = 0;
  for (const AttentionSequence& sequence : sequences) {
    for (int t = 0; t < sequence.count; ++t) {
      ints[sequence.first + t] = sequence.position + t;
      first_pages[sequence.first + t] = at;
    }
    const auto count = static_cast<int32_t>(ceil_div(sequence.position + sequence.count, kPageTokens));
    std::copy_n(sequence.pages, count, tables + at);
    at += count;
  }
  for (size_t i = 0; i < ropes_.size(); ++i) {
    const int64_t half = ropes_[i].spec().dims / 2;
    float* const cosines = floats + angles_at_[i];
    for (int t = 0; t < tokens; ++t)
      ropes_[i].angles(ints[t], cosines + t * half, cosines + (max_tokens_ + t) * half);
  }
  stream.copy(device_.at(), host_.data(),
              static_cast<size_t>(width()) * static_cast<size_t>(max_tokens_) * sizeof(float) +
                  static_cast<size_t>(at) * sizeof(int32_t));
}

TokenPlaces GpuStep::places() const {
  const auto* const ints = device_.as<const int32_t>();
  return {.positions = ints, .first_pages = ints + max_tokens_, .pages = ints + width() * max_tokens_};
}

const float* GpuStep::cosines(int rotation) const {
  return device_.as<const float>() + angles_at_[static_cast<size_t>(rotation)];
}
const float* GpuStep::sines(int rotation) const {
  return cosines(rotation) + int64_t{max_tokens_} * (rope(rotation).spec().dims / 2);
}

const float* GpuStep::growth(const QueryGrowth& of, GpuStream& stream) {
  const auto* const positions = reinterpret_cast<const int32_t*>(host_.data());
  std::vector<float> factors(static_cast<size_t>(tokens_));
  for (int t = 0; t < tokens_; ++t) factors[static_cast<size_t>(t)] = of.factor(positions[t]);
  if (std::ranges::all_of(factors, [](float factor) { return factor == 1; })) return nullptr;
  float* const to = device_.as<float>() + int64_t{2} * max_tokens_;
  stream.copy(to, factors.data(), factors.size() * sizeof(float));
  return to;
}

}  // namespace kt
