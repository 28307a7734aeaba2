// Keys and values of all layers in pages of tokens, so that sequences grow and share prefixes without copies.
// Memory only: who owns which page is the engine's business.
#pragma once
#include <cstdint>

#include "base/memory.h"
#include "kernels/table.h"

namespace kt {

inline constexpr int kPageTokens = 64;

struct KvShape {
  int layers = 0;
  int heads = 1;        // of keys and values
  int d = 0, dv = 0;    // of one head; stored padded to multiples of 16
  bool shared = false;  // values are the first dv numbers of the keys (latent attention)
  Real type = Real::kBf16;

  int d_pad() const { return (d + 15) / 16 * 16; }
  int dv_pad() const { return (dv + 15) / 16 * 16; }
  size_t element_bytes() const { return type == Real::kF32 ? 4 : 2; }
  // Of one page in one layer: [heads, kPageTokens, d_pad], then the same of values unless shared.
  size_t page_bytes() const {
    return static_cast<size_t>(heads) * kPageTokens * static_cast<size_t>(d_pad() + (shared ? 0 : dv_pad())) *
           element_bytes();
  }
};

class KvCache {
 public:
  // Error(kMemory) with the numbers if the pages do not fit the memory.
  KvCache(const KvShape& shape, int pages);
  const KvShape& shape() const { return shape_; }
  int pages() const { return pages_; }
  size_t bytes() const { return memory_.size(); }

  // [kPageTokens, d_pad] and [kPageTokens, dv_pad] of one head.
  std::byte* keys(int layer, int page, int head);
  std::byte* values(int layer, int page, int head);
  const std::byte* keys(int layer, int page, int head) const;
  const std::byte* values(int layer, int page, int head) const;

 private:
  KvShape shape_;
  int pages_;
  Buffer memory_;  // [layers, pages, page_bytes]
};

}  // namespace kt
