#include "nn/gpu_step.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "base/error.h"

namespace kt::inline nn {
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
  int64_t sum = 2 + static_cast<int64_t>(kMostGrowths);  // position, first page, factors
  for (const Rope& rope : ropes_) sum += rope.spec().dims;
  return sum;
}

void GpuStep::allocate(std::shared_ptr<const Gpu> gpu, int max_tokens) {
  gpu_ = std::move(gpu);
  max_tokens_ = max_tokens;
  device_ = {};
  reserve(kLeastPages);
}

void GpuStep::reserve(size_t pages) {
  if (pages <= pages_ && device_.size() > 0) return;
  ++version_;
  pages_ = std::max(pages, 2 * pages_);
  const size_t bytes =
      (static_cast<size_t>(kHead + width() * max_tokens_) + pages_ + static_cast<size_t>(max_tokens_)) *
      sizeof(float);
  host_ = pinned_for(*gpu_, bytes);
  device_ = DeviceBuffer(gpu_, bytes, "tables of a step");
}

int64_t GpuStep::angles_at(int rotation) const {
  int64_t at = kHead + (2 + static_cast<int64_t>(kMostGrowths)) * rows_;
  for (int i = 0; i < rotation; ++i) at += int64_t{rope(i).spec().dims} * rows_;
  return at;
}

void GpuStep::fill(std::span<const AttentionSequence> sequences, int tokens, int rows, uint32_t number) {
  rows_ = rows;
  sent_ = false;
  size_t pages = 0;
  for (const AttentionSequence& sequence : sequences)
    pages += static_cast<size_t>(ceil_div(sequence.position + sequence.count, kPageTokens));
  reserve(std::max(kLeastPages, pages));
  auto* const ints = reinterpret_cast<int32_t*>(host_.data());
  auto* const floats = reinterpret_cast<float*>(host_.data());
  const StepWords words{.number = number, .tokens = tokens};
  std::memcpy(host_.data(), &words, sizeof words);
  int32_t* const positions = ints + kHead;
  int32_t* const first_pages = positions + rows;
  int32_t* const tables = ints + kHead + width() * rows;
  std::fill_n(positions, rows, 0);
  std::fill_n(first_pages, rows, 0);
  int32_t at = 0;
  for (const AttentionSequence& sequence : sequences) {
    for (int t = 0; t < sequence.count; ++t) {
      positions[sequence.first + t] = sequence.position + t;
      first_pages[sequence.first + t] = at;
    }
    const auto count = static_cast<int32_t>(ceil_div(sequence.position + sequence.count, kPageTokens));
    std::copy_n(sequence.pages, count, tables + at);
    at += count;
  }
  for (size_t i = 0; i < growths_.size(); ++i) fill_growth(i);
  for (int i = 0; i < static_cast<int>(ropes_.size()); ++i) {
    const int64_t half = rope(i).spec().dims / 2;
    float* const cosines = floats + angles_at(i);
    for (int t = 0; t < rows; ++t)
      rope(i).angles(positions[t], cosines + t * half, cosines + (rows + t) * half);
  }
  used_ = static_cast<size_t>(kHead + width() * rows + at) * sizeof(float);
}

void GpuStep::send(GpuStream& stream) {
  stream.copy(device_.at(), host_.data(), used_);
  sent_ = true;
}

TokenPlaces GpuStep::places() const {
  const auto* const ints = device_.as<const int32_t>() + kHead;
  return {.step = words(), .positions = ints, .first_pages = ints + rows_, .pages = ints + width() * rows_};
}

const float* GpuStep::cosines(int rotation) const { return device_.as<const float>() + angles_at(rotation); }
const float* GpuStep::sines(int rotation) const {
  return cosines(rotation) + int64_t{rows_} * (rope(rotation).spec().dims / 2);
}

void GpuStep::fill_growth(size_t kind) {
  const auto* const positions = reinterpret_cast<const int32_t*>(host_.data()) + kHead;
  float* const factors =
      reinterpret_cast<float*>(host_.data()) + kHead + (2 + static_cast<int64_t>(kind)) * rows_;
  for (int t = 0; t < rows_; ++t) factors[t] = growths_[kind].factor(positions[t]);
}

const float* GpuStep::growth(const QueryGrowth& of) {
  size_t kind = 0;
  while (kind < growths_.size() && growths_[kind] != of) ++kind;
  if (kind == growths_.size()) {
    KT_CHECK(kind < kMostGrowths, "more than {} kinds of growing queries", kMostGrowths);
    growths_.push_back(of);
    fill_growth(kind);
    sent_ = false;
  }
  return device_.as<const float>() + kHead + (2 + static_cast<int64_t>(kind)) * rows_;
}

}  // namespace kt::inline nn
