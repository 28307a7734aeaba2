// Keys and values of all layers in pages of tokens, so that sequences grow and share prefixes without copies.
// Memory only: who owns which page is the engine's business.
#pragma once
#include <cstdint>
#include <string_view>

#include "base/memory.h"
#include "kernels/attention.h"
#include "kernels/table.h"

namespace kt {

inline constexpr int kPageTokens = kKvBlock;

KvType kv_type_named(std::string_view name);  // "f32", "bf16", "int8"; Error with the list otherwise
std::string_view name_of(KvType type);

struct KvShape {
  int layers = 0;
  int heads = 1;      // of keys and values
  int d = 0, dv = 0;  // of one head; stored padded to multiples of kKvColumns
  bool shared =
      false;  // values are the first dv numbers of the keys (latent attention): stored once, as values
  KvType type = KvType::kBf16;

  int d_pad() const { return (d + kKvColumns - 1) / kKvColumns * kKvColumns; }
  int dv_pad() const { return (dv + kKvColumns - 1) / kKvColumns * kKvColumns; }
  // Of one head's block (kernels/attention.h), scales included.
  size_t block_bytes(int columns) const {
    return static_cast<size_t>(kPageTokens) *
           (static_cast<size_t>(columns) * static_cast<size_t>(kv_bytes(type)) +
            (type == KvType::kS8 ? sizeof(float) : 0));
  }
  // Of one page in one layer: blocks of keys of all heads, then those of values unless shared.
  size_t page_bytes() const {
    return static_cast<size_t>(heads) * (block_bytes(d_pad()) + (shared ? 0 : block_bytes(dv_pad())));
  }
};

// New tokens of one sequence: rows [first, first + count) of a batch, at positions [position, position +
// count).
struct AttentionSequence {
  int first = 0, count = 0, position = 0;
  const int32_t* pages = nullptr;  // page of tokens 0..63, 64..127, ...
};

class KvCache {
 public:
  // Error(kMemory) with the numbers if the pages do not fit the memory.
  KvCache(const KvShape& shape, int pages);
  const KvShape& shape() const { return shape_; }
  int pages() const { return pages_; }
  size_t bytes() const { return memory_.size(); }

  // A head's block; the same for both where the cache shares them.
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
