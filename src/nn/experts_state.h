// What Experts, its forward and copies of it on a device share; not for other files.
#pragma once
#include "base/checked.h"
#include "nn/experts.h"
#include "nn/padded_parts.h"

namespace kt::inline nn {

constexpr size_t bytes_of(Real type) { return type == Real::kF32 ? 4 : 2; }

// The row blocks of one projection within an expert's bytes: block b begins at first + b * stride.
struct StoredBlocks {
  Packing packing;
  size_t first = 0, stride = 0;
  size_t at(int64_t block) const { return first + static_cast<size_t>(block) * stride; }
};

// One node's slice [begin, end) of `inter`, as wide as it is packed: gate and up of an expert, then down.
// Gate and up of one format stand in pairs, gate block, up block, gate block ...: an item of pairs is one
// stream of bytes and one multiplication. Of two formats, all gate blocks stand before all up blocks: kernels
// walk blocks of one size that follow each other, so an item is two runs and two multiplications of many
// blocks each; in pairs it would be one call for every block, which reads all rows again for 16 columns.
struct Shard {
  int begin = 0, end = 0;
  StoredBlocks gate, up, down;
  bool paired = true;
  size_t expert_bytes = 0;
  Buffer memory;
  std::vector<float> gate_bias, up_bias;  // [experts, width()] or empty

  bool empty() const { return begin == end; }
  int64_t width() const { return gate.packing.blocks * kBlockRows; }  // end - begin, in whole blocks
  // Gate and up of a row side by side, in the order in which a backward contracts over them: blocks in turns as they
  // are packed, or all of gate, filled up to whole chunks, then all of up.
  int64_t up_at() const { return paired ? kBlockRows : round_up(width(), kChunk); }
  int64_t block_step() const { return paired ? 2 * kBlockRows : kBlockRows; }
  int64_t both() const { return paired ? 2 * width() : up_at() + width(); }
  const std::byte* expert(int e) const { return memory.data() + static_cast<size_t>(e) * expert_bytes; }
  std::byte* expert(int e) { return memory.data() + static_cast<size_t>(e) * expert_bytes; }
  // Block `block` of one of the three.
  const std::byte* block(int e, const StoredBlocks& of, int64_t block) const {
    return expert(e) + of.at(block);
  }
};

struct Experts::State {
  std::shared_ptr<Pool> pool;
  std::shared_ptr<Workspace> workspace;
  ExpertsShape shape;
  ExpertsOptions options;
  PaddedParts padding;  // what is packed and multiplied is wider than `shape`
  const Kernels* kernels = nullptr;
  std::vector<Shard> shards;       // one per node; begin == end: this node has nothing to do
  std::vector<float> down_bias;    // [experts, hidden] or empty
  std::vector<uint8_t> is_loaded;  // [experts]
  std::mutex bias_mutex;           // bias arrays grow with the first expert that has one

  // Rows [first, first + piece.n) of one projection, which begin with a row block.
  void pack_in(int expert, StoredBlocks Shard::* into, int64_t first, const MatrixView& piece);
  void pack_down(int expert, int64_t first, const MatrixView& piece);
  struct Biases {
    const float *gate, *up, *down;
  };
  void finish_load(int expert, const Biases& biases);
  using WalkPieces = FunctionRef<void(const RowReader&, UsePiece)>;
  void load_pieces(int expert, const ExpertRows& w, WalkPieces walk);
  // Experts::read_block of what is packed.
  void read_packed(int expert, ExpertPart part, int64_t block, int64_t rows, Matrix& out) const;
};

}  // namespace kt::inline nn
