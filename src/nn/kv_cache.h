// What a model keeps of its sequences: keys and values of tokens in pages, so that sequences grow and share
// prefixes without copies, and a state of fixed size for each sequence, where layers are recurrent. Memory
// only: who owns which page and which slot is the engine's business.
#pragma once
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "kernels/attention.h"
#include "kernels/table.h"

namespace kt::inline nn {

inline constexpr int kPageTokens = kKvBlock;

KvType kv_type_named(std::string_view name);  // "f32", "bf16", "int8"; Error with the list otherwise
std::string_view name_of(KvType type);

// A plane of the cache: the keys and values of one layer.
struct KvShape {
  int heads = 1;      // of keys and values
  int d = 0, dv = 0;  // of one head; stored padded to multiples of kKvColumns. dv 0: keys without values
  bool shared =
      false;  // values are the first dv numbers of the keys (latent attention): stored once, as values
  KvType type = KvType::kBf16;
  bool operator==(const KvShape&) const = default;

  int d_pad() const { return (d + kKvColumns - 1) / kKvColumns * kKvColumns; }
  int dv_pad() const { return (dv + kKvColumns - 1) / kKvColumns * kKvColumns; }
  // Of one head's block (kernels/attention.h), scales included.
  size_t block_bytes(int columns) const {
    return static_cast<size_t>(kPageTokens) *
           (static_cast<size_t>(columns) * static_cast<size_t>(kv_bytes(type)) +
            (type == KvType::kS8 ? sizeof(float) : 0));
  }
  bool has_values() const { return !shared && dv > 0; }  // that are stored
  // Of one page in one layer: blocks of keys of all heads, then those of values.
  size_t page_bytes() const {
    return static_cast<size_t>(heads) * (block_bytes(d_pad()) + (has_values() ? block_bytes(dv_pad()) : 0));
  }
};

// New tokens of one sequence: rows [first, first + count) of a batch, at positions [position, position +
// count).
struct AttentionSequence {
  int first = 0, count = 0, position = 0;
  const int32_t* pages = nullptr;  // page of tokens 0..63, 64..127, ...
  int32_t slot = -1;               // of its state, where the model keeps one
};

// What the layers of a model keep, in their order. A layer without keys has no plane, one without a state no
// bytes of a slot.
struct SequenceShape {
  std::vector<KvShape> planes;
  std::vector<size_t> states;  // bytes of one sequence in each layer that has a state
  bool operator==(const SequenceShape&) const = default;

  size_t page_bytes() const;  // of all planes
  size_t slot_bytes() const;  // of all states
};

// Pages and slots in the memory of a place. Made by an Ops (nn/ops.h), and what is in them is known to it alone. What
// is in a slot before it is cleared or copied to is anything.
class SequenceCache {
 public:
  SequenceCache(SequenceShape shape, int pages, int slots)
      : shape_(std::move(shape)), pages_(pages), slots_(slots) {}
  virtual ~SequenceCache() = default;
  const SequenceShape& shape() const { return shape_; }
  const KvShape& shape(int plane) const { return shape_.planes[static_cast<size_t>(plane)]; }
  int pages() const { return pages_; }
  int slots() const { return slots_; }
  virtual size_t bytes() const = 0;
  virtual void clear_slot(int slot) = 0;         // zeros in every layer
  virtual void copy_slot(int from, int to) = 0;  // every layer's

 private:
  const SequenceShape shape_;
  const int pages_, slots_;
};

// In host memory.
class KvCache final : public SequenceCache {
 public:
  // Error(kMemory) with the numbers if the pages do not fit the memory.
  KvCache(const SequenceShape& shape, int pages, int slots = 0);
  size_t bytes() const override { return memory_.size() + states_.size(); }

  // A head's block; the same for both where the plane shares them.
  std::byte* keys(int plane, int page, int head);
  std::byte* values(int plane, int page, int head);
  const std::byte* keys(int plane, int page, int head) const;
  const std::byte* values(int plane, int page, int head) const;

  // The state of one sequence in the layer whose state is number `state`; aligned to 64 bytes.
  std::byte* state(int state, int slot);
  void clear_slot(int slot) override;
  void copy_slot(int from, int to) override;

 private:
  std::vector<size_t> plane_at_;  // bytes
  std::vector<size_t> state_at_;  // bytes within a slot
  size_t slot_bytes_ = 0;
  Buffer memory_;  // [planes, pages, page_bytes of the plane]
  Buffer states_;  // [slots, slot_bytes_]
};

}  // namespace kt::inline nn
