// What Experts and its forward share; not for other files.
#pragma once
#include "nn/experts.h"

namespace kt {

constexpr size_t bytes_of(Real type) { return type == Real::kF32 ? 4 : 2; }

// One node's slice [begin, end) of `inter`. An expert is stored as [gate block, up block] pairs, then down
// blocks.
struct Shard {
  int begin = 0, end = 0;
  Packing gate_up;  // of gate, and of up
  Packing down;
  size_t pair_bytes = 0, gate_up_bytes = 0, expert_bytes = 0;
  Buffer memory;
  std::vector<float> gate_bias, up_bias;  // [experts, 16 * gate_up.blocks] or empty
  const std::byte* expert(int e) const { return memory.data() + static_cast<size_t>(e) * expert_bytes; }
};

struct Experts::State {
  std::shared_ptr<Pool> pool;
  std::shared_ptr<Workspace> workspace;
  ExpertsShape shape;
  ExpertsOptions options;
  const Kernels* kernels = nullptr;
  std::vector<Shard> shards;       // one per node; begin == end: this node has nothing to do
  std::vector<float> down_bias;    // [experts, hidden] or empty
  std::vector<uint8_t> is_loaded;  // [experts]
  std::mutex bias_mutex;           // bias arrays grow with the first expert that has one

  // Rows [first, first + piece.n) of one projection, which begin with a row block.
  enum class Half { kGate, kUp };
  void pack_in(int expert, Half half, int64_t first, const MatrixView& piece);
  void pack_down(int expert, int64_t first, const MatrixView& piece);
  struct Biases {
    const float *gate, *up, *down;
  };
  void finish_load(int expert, const Biases& biases);
  using WalkPieces = FunctionRef<void(const RowReader&, UsePiece)>;
  void load_pieces(int expert, const ExpertRows& w, WalkPieces walk);
};

}  // namespace kt
