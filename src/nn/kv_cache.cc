#include "nn/kv_cache.h"

#include <array>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "base/error.h"

namespace kt::inline nn {
namespace {

constexpr size_t kStateAlignment = 64;

constexpr auto kNames = std::to_array<std::pair<std::string_view, KvType>>(
    {{"bf16", KvType::kBf16}, {"int8", KvType::kS8}, {"f32", KvType::kF32}});

}  // namespace

KvType kv_type_named(std::string_view name) {
  for (const auto& [known, type] : kNames)
    if (known == name) return type;
  fail("unknown precision of keys and values '{}': bf16, int8, f32 are known", name);
}

std::string_view name_of(KvType type) {
  for (const auto& [name, known] : kNames)
    if (known == type) return name;
  return "unknown";
}

size_t SequenceShape::page_bytes() const {
  size_t sum = 0;
  for (const KvShape& plane : planes) sum += plane.page_bytes();
  return sum;
}

size_t SequenceShape::slot_bytes() const {
  size_t sum = 0;
  for (const size_t bytes : states) sum += round_up(bytes, kStateAlignment);
  return sum;
}

KvCache::KvCache(const SequenceShape& shape, int pages, int slots)
    : SequenceCache(shape, pages, slots), slot_bytes_(shape.slot_bytes()) {
  size_t at = 0;
  for (const KvShape& plane : shape.planes) {
    plane_at_.push_back(at);
    at = checked_add(at, checked_mul(static_cast<size_t>(pages), plane.page_bytes(), "KV cache"), "KV cache");
  }
  memory_ = Buffer(at);
  at = 0;
  for (const size_t bytes : shape.states) {
    state_at_.push_back(at);
    at += round_up(bytes, kStateAlignment);
  }
  if (slots > 0 && slot_bytes_ > 0)
    states_ = Buffer(checked_mul(static_cast<size_t>(slots), slot_bytes_, "states of sequences"));
}

const std::byte* KvCache::keys(int plane, int page, int head) const {
  const KvShape& of = shape(plane);
  return memory_.data() + plane_at_[static_cast<size_t>(plane)] +
         static_cast<size_t>(page) * of.page_bytes() + static_cast<size_t>(head) * of.block_bytes(of.d_pad());
}

const std::byte* KvCache::values(int plane, int page, int head) const {
  const KvShape& of = shape(plane);
  if (of.shared) return keys(plane, page, head);
  return keys(plane, page, of.heads) + static_cast<size_t>(head) * of.block_bytes(of.dv_pad());
}

std::byte* KvCache::keys(int plane, int page, int head) {
  return const_cast<std::byte*>(static_cast<const KvCache*>(this)->keys(plane, page, head));
}
std::byte* KvCache::values(int plane, int page, int head) {
  return const_cast<std::byte*>(static_cast<const KvCache*>(this)->values(plane, page, head));
}

std::byte* KvCache::state(int state, int slot) {
  return states_.data() + static_cast<size_t>(slot) * slot_bytes_ + state_at_[static_cast<size_t>(state)];
}

void KvCache::clear_slot(int slot) {
  if (slot_bytes_ > 0) std::memset(states_.data() + static_cast<size_t>(slot) * slot_bytes_, 0, slot_bytes_);
}

void KvCache::copy_slot(int from, int to) {
  if (slot_bytes_ == 0 || from == to) return;
  std::memcpy(states_.data() + static_cast<size_t>(to) * slot_bytes_,
              states_.data() + static_cast<size_t>(from) * slot_bytes_, slot_bytes_);
}

}  // namespace kt::inline nn
