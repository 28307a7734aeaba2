#include "nn/kv_cache.h"

#include <array>
#include <utility>

#include "base/checked.h"
#include "base/error.h"

namespace kt {
namespace {

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

KvCache::KvCache(const KvShape& shape, int pages)
    : shape_(shape),
      pages_(pages),
      memory_(
          checked_mul(checked_mul(static_cast<size_t>(shape.layers), static_cast<size_t>(pages), "KV cache"),
                      shape.page_bytes(), "KV cache")) {}

const std::byte* KvCache::keys(int layer, int page, int head) const {
  return memory_.data() +
         (static_cast<size_t>(layer) * static_cast<size_t>(pages_) + static_cast<size_t>(page)) *
             shape_.page_bytes() +
         static_cast<size_t>(head) * shape_.block_bytes(shape_.d_pad());
}

const std::byte* KvCache::values(int layer, int page, int head) const {
  if (shape_.shared) return keys(layer, page, head);
  return keys(layer, page, shape_.heads) + static_cast<size_t>(head) * shape_.block_bytes(shape_.dv_pad());
}

std::byte* KvCache::keys(int layer, int page, int head) {
  return const_cast<std::byte*>(static_cast<const KvCache*>(this)->keys(layer, page, head));
}
std::byte* KvCache::values(int layer, int page, int head) {
  return const_cast<std::byte*>(static_cast<const KvCache*>(this)->values(layer, page, head));
}

}  // namespace kt
