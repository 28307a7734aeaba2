#include "nn/kv_cache.h"

#include "base/checked.h"

namespace kt {

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
         static_cast<size_t>(head) * kPageTokens * static_cast<size_t>(shape_.d_pad()) *
             shape_.element_bytes();
}

const std::byte* KvCache::values(int layer, int page, int head) const {
  if (shape_.shared) return keys(layer, page, head);
  return keys(layer, page, shape_.heads) + static_cast<size_t>(head) * kPageTokens *
                                               static_cast<size_t>(shape_.dv_pad()) * shape_.element_bytes();
}

std::byte* KvCache::keys(int layer, int page, int head) {
  return const_cast<std::byte*>(static_cast<const KvCache*>(this)->keys(layer, page, head));
}
std::byte* KvCache::values(int layer, int page, int head) {
  return const_cast<std::byte*>(static_cast<const KvCache*>(this)->values(layer, page, head));
}

}  // namespace kt
