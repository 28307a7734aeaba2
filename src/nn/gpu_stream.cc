#include "nn/gpu_stream.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/checked.h"
#include "base/error.h"
#include "nn/experts_state.h"

namespace kt::inline nn {
namespace {

constexpr size_t kAlignment = 256;                 // of what kernels read, in a slot
constexpr size_t kLeastLocked = 1 << 20;           // smaller buffers share pages with others
constexpr size_t kStageStretch = size_t{1} << 20;  // of a copy that workers share

size_t aligned(size_t bytes) { return round_up(bytes, kAlignment); }

}  // namespace

size_t SentExperts::add(const void* first, size_t bytes, bool locked) {
  parts_.push_back({static_cast<const std::byte*>(first), bytes, locked});
  return parts_.size() - 1;
}

SentExperts::SentExperts(const std::shared_ptr<const Gpu>& gpu, const Experts& from)
    : experts_(from.shape().experts) {
  const auto biases = [&](const std::vector<float>& all) -> int {
    if (all.empty()) return -1;
    const size_t bytes = all.size() * sizeof(float);
    const void* at = all.data();
    if (gpu) {
      PinnedBuffer held = pinned_for(*gpu, bytes);
      std::memcpy(held.data(), all.data(), bytes);
      at = biases_.emplace_back(std::move(held)).data();
    }
    return static_cast<int>(add(at, bytes / static_cast<size_t>(experts_), true));
  };
  for (const Shard& shard : from.state().shards) {
    if (shard.empty()) continue;
    bool locked = false;
    if (gpu && why_.empty() && shard.memory.size() >= kLeastLocked) try {
        locks_.emplace_back(gpu, shard.memory.data(), shard.memory.size());
        locked = true;
      } catch (const Error& error) {
        why_ = error.what();
      }
    Piece& piece = pieces_.emplace_back();
    piece.blocks = add(shard.memory.data(), shard.expert_bytes, locked);
    piece.gate_bias = biases(shard.gate_bias);
    piece.up_bias = biases(shard.up_bias);
  }
  down_bias_ = biases(from.state().down_bias);
}

size_t SentExperts::expert_bytes() const {
  size_t sum = 0;
  for (const Part& part : parts_) sum += part.bytes;
  return sum;
}

bool SentExperts::locked() const {
  return std::ranges::all_of(parts_, [](const Part& part) { return part.locked; });
}

GpuExperts::Copies SentExperts::copies(std::span<uint8_t* const> parts, const int32_t* slots,
                                       int count) const {
  const auto bias = [&](int part) {
    return part < 0 ? nullptr : reinterpret_cast<const float*>(parts[static_cast<size_t>(part)]);
  };
  GpuExperts::Copies out{.slots = slots, .count = count, .pieces = {}, .down_bias = bias(down_bias_)};
  for (const Piece& piece : pieces_)
    out.pieces.push_back(
        {.blocks = parts[piece.blocks], .gate_bias = bias(piece.gate_bias), .up_bias = bias(piece.up_bias)});
  return out;
}

void ExpertStream::add(const SentExperts* layer) { layers_.push_back(layer); }

bool ExpertStream::any() const {
  return std::ranges::any_of(layers_, [](const SentExperts* layer) { return layer != nullptr; });
}

bool ExpertStream::all() const {
  return std::ranges::all_of(layers_, [](const SentExperts* layer) { return layer != nullptr; });
}

size_t ExpertStream::first() const {
  size_t layer = 0;
  while (!layers_[layer]) ++layer;
  return layer;
}

int ExpertStream::most_experts() const {
  int most = 0;
  for (const SentExperts* layer : layers_)
    if (layer) most = std::max(most, layer->experts());
  return most;
}

// A table of the layer's experts, then its parts.
size_t ExpertStream::slot_bytes() const {
  size_t one = 0, all = 0;
  for (const SentExperts* layer : layers_) {
    if (!layer) continue;
    const size_t padding = layer->parts().size() * kAlignment;
    one = std::max(one, layer->expert_bytes() + padding);
    all = std::max(all, layer->expert_bytes() * static_cast<size_t>(layer->experts()) + padding);
  }
  if (all == 0) return 0;
  const size_t table = aligned(static_cast<size_t>(most_experts()) * sizeof(int32_t));
  return table + aligned(std::clamp(wished_ / kSlots, one, all));
}

size_t ExpertStream::bytes() const { return kSlots * slot_bytes(); }

int ExpertStream::batch_experts(const SentExperts& layer) const {
  const size_t table = aligned(static_cast<size_t>(most_experts()) * sizeof(int32_t));
  const size_t room = slot_bytes() - table - layer.parts().size() * kAlignment;
  return static_cast<int>(std::min(room / layer.expert_bytes(), static_cast<size_t>(layer.experts())));
}

std::vector<size_t> ExpertStream::places(const SentExperts& layer) const {
  const auto count = static_cast<size_t>(batch_experts(layer));
  std::vector<size_t> out;
  size_t at = aligned(static_cast<size_t>(most_experts()) * sizeof(int32_t));
  for (const SentExperts::Part& part : layer.parts()) {
    out.push_back(at);
    at += aligned(part.bytes * count);
  }
  return out;
}

void ExpertStream::allocate() {
  if (!any()) return;
  copies_ = std::make_unique<GpuStream>(gpu_);
  slots_.clear();
  bool stages = false;
  int64_t batches = 0;
  for (const SentExperts* layer : layers_) {
    if (!layer) continue;
    batches += ceil_div(layer->experts(), batch_experts(*layer));
    for (const SentExperts::Part& part : layer->parts()) stages = stages || !part.locked;
  }
  for (size_t i = 0; i < kSlots; ++i)
    slots_.push_back({.memory = DeviceBuffer(gpu_, slot_bytes(), "slots of experts that pass"),
                      .arrived = GpuEvent(gpu_),
                      .freed = GpuEvent(gpu_),
                      .stage = stages ? pinned_for(*gpu_, slot_bytes()) : PinnedBuffer()});
  tables_ = pinned_for(*gpu_, static_cast<size_t>(batches * most_experts()) * sizeof(int32_t));
}

void ExpertStream::drain() {
  if (copies_) copies_->wait();
}

void ExpertStream::begin() {
  drain();
  batches_.clear();
  issued_ = taken_ = 0;
}

void ExpertStream::want(size_t layer, const uint8_t* skip) {
  const SentExperts& from = *layers_[layer];
  const auto most = static_cast<size_t>(batch_experts(from));
  bool open = false;
  for (int expert = 0; expert < from.experts(); ++expert) {
    if (skip && skip[expert]) continue;
    if (!open || batches_.back().experts.size() == most) batches_.push_back({.layer = layer, .experts = {}});
    open = true;
    batches_.back().experts.push_back(expert);
  }
  pump();
}

void ExpertStream::take(size_t layer, GpuStream& compute, FunctionRef<void(const GpuExperts::Copies&)> run) {
  for (; taken_ < batches_.size() && batches_[taken_].layer == layer; pump()) {
    KT_CHECK(taken_ < issued_, "batch {} of experts was not sent", taken_);
    const SentExperts& from = *layers_[layer];
    const Slot& slot = slots_[taken_ % kSlots];
    std::vector<uint8_t*> parts;
    for (const size_t place : places(from)) parts.push_back(slot.memory.at(place));
    compute.hold(slot.arrived);
    run(from.copies(parts, slot.memory.as<const int32_t>(),
                    static_cast<int>(batches_[taken_].experts.size())));
    compute.record(slot.freed);
    ++taken_;
  }
}

// As many batches are under way as there are slots.
void ExpertStream::pump() {
  for (; issued_ < batches_.size() && issued_ < taken_ + kSlots; ++issued_) send(issued_);
}

// The part of these experts, one behind the other, in page-locked memory.
const std::byte* ExpertStream::staged(Slot& slot, const SentExperts::Part& part, size_t place,
                                      std::span<const int> experts) {
  std::byte* const to = slot.stage.data() + place;
  const size_t pieces = ceil_div(part.bytes, kStageStretch), all = experts.size() * pieces;
  run_items(*pool_, static_cast<int64_t>(all), [&](int64_t item) {
    const auto i = static_cast<size_t>(item);
    const size_t at = i % pieces * kStageStretch, expert = i / pieces;
    std::memcpy(to + expert * part.bytes + at,
                part.first + static_cast<size_t>(experts[expert]) * part.bytes + at,
                std::min(kStageStretch, part.bytes - at));
  });
  return to;
}

void ExpertStream::send(size_t number) {
  const Batch& batch = batches_[number];
  const SentExperts& from = *layers_[batch.layer];
  Slot& slot = slots_[number % kSlots];
  const auto most = static_cast<size_t>(most_experts());
  auto* const table = reinterpret_cast<int32_t*>(tables_.data()) + number * most;
  std::fill_n(table, from.experts(), -1);
  for (size_t i = 0; i < batch.experts.size(); ++i) table[batch.experts[i]] = static_cast<int32_t>(i);
  // What was staged there before has left.
  if (slot.stage.size() > 0)
    while (number >= kSlots && !slot.arrived.passed()) std::this_thread::yield();
  if (number >= kSlots) copies_->hold(slot.freed);
  copies_->copy(slot.memory.at(), table, static_cast<size_t>(from.experts()) * sizeof(int32_t));
  const std::vector<size_t> at = places(from);
  for (size_t p = 0; p < at.size(); ++p) {
    const SentExperts::Part& part = from.parts()[p];
    sent_ += part.bytes * batch.experts.size();
    uint8_t* const to = slot.memory.at(at[p]);
    if (!part.locked) {
      copies_->copy(to, staged(slot, part, at[p], batch.experts), part.bytes * batch.experts.size());
      continue;
    }
    // Of neighbours at once.
    for (size_t first = 0, end = 0; first < batch.experts.size(); first = end) {
      for (end = first + 1; end < batch.experts.size() && batch.experts[end] == batch.experts[end - 1] + 1;)
        ++end;
      copies_->copy(to + first * part.bytes,
                    part.first + static_cast<size_t>(batch.experts[first]) * part.bytes,
                    (end - first) * part.bytes);
    }
  }
  copies_->record(slot.arrived);
}

}  // namespace kt::inline nn
