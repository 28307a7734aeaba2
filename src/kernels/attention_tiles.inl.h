// Attention's products on a tile unit, bit for bit those of the route of rows: blocks of bf16 are the unit's second
// operand as they lie, s8 is widened into such a block, or into a stretch of columns.
#pragma once
#include "kernels/attention_weights.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

inline constexpr int kNarrowRows = Isa::kTileUnit ? 3 : INT32_MAX;  // fewer are done sooner without tiles
inline constexpr int kTile = 16, kTwo = 2 * kTile;

// C of all rows, two by two tiles, the second operand 32 columns: block(Int<row tiles>, first row) for each.
template <class Block>
KT_INLINE void for_tiles(int rows, Block&& block) {
  for (int row = 0; row < rows; row += kTwo)
    if (rows - row > kTile)
      block(Int<2>{}, row);
    else
      block(Int<1>{}, row);
}

template <class Tiled, KvType kType, class Fetch>
KT_INLINE void score_tiles(const AttendArgs& args, const Memory& memory, Fetch& ahead) {
  const int64_t q_stride = int64_t{args.d} * 2;
  for (int b = 0; b < blocks_of(args); ++b) {
    const uint8_t* block;
    if (!args.k) {
      block = shared_keys<kType>(args, memory, b);
    } else if constexpr (kType == KvType::kS8) {
      widen_s8(block_at(args.k, b), kKvBlock * 4, args.d / 4, kKvBlock, memory.wide, kKvBlock * 4);
      block = memory.wide;
    } else {
      block = block_at(args.k, b);
    }
    const int keys = args.keys - b * kKvBlock < kKvBlock ? args.keys - b * kKvBlock : kKvBlock;
    for (int key = 0; key < keys; key += kTwo) {
      const typename Tiled::PlainB columns{&block, key * 4, kKvBlock * 4, args.d / 32, args.d / 32};
      for_tiles(args.rows, [&](auto tiles, int row) __attribute__((always_inline)) {
        Tiled::template plain_block<tiles.value, 2>(
            static_cast<const uint8_t*>(args.q_bf16) + row * q_stride, q_stride, columns,
            memory.scores(row) + b * kKvBlock + key, kScoreFloats, ahead);
      });
    }
  }
}

template <class Tiled, KvType kType, class Fetch>
KT_INLINE void value_tiles(const AttendArgs& args, const Memory& memory, Fetch& ahead) {
  const int steps = (args.keys + 31) / 32, blocks = blocks_of(args);
  const uint8_t* pieces[kt::kGroupBlocks] = {};
  for (int b = 0; b < blocks; ++b)
    pieces[b] = kType == KvType::kS8 ? memory.wide + b * (kKvBlock / 2) * kTwo * 4 : block_at(args.v, b);
  alignas(64) float found[kTwo][kTwo];
  for (int c = 0; c < args.dv; c += kTwo) {
    typename Tiled::PlainB columns{pieces, c * 4, int64_t{args.v_width} * 4, kKvBlock / 32, steps};
    if constexpr (kType == KvType::kS8) {
      for (int b = 0; b < blocks; ++b) {
        const int words = (steps - 2 * b < 2 ? 1 : 2) * 8;
        widen_s8(block_at(args.v, b) + c * 4, int64_t{args.v_width} * 4, words, kTwo,
                 memory.wide + b * (kKvBlock / 2) * kTwo * 4, kTwo * 4);
      }
      columns.offset = 0;
      columns.stride = kTwo * 4;
    }
    for_tiles(args.rows, [&](auto tiles, int row) __attribute__((always_inline)) {
      Tiled::template plain_block<tiles.value, 2>(reinterpret_cast<const uint8_t*>(memory.weights(row)),
                                                  kScoreFloats * 4, columns, found[0], kTwo, ahead);
      const int rows = args.rows - row < kTwo ? args.rows - row : kTwo;
      for (int r = 0; r < rows; ++r)
        for (int i = 0; i < kTwo; i += Isa::kLanes)
          put_out(args, memory, row + r, c + i, Isa::load(found[r] + i));
    });
  }
}

template <class Tiled, KvType kType>
__attribute__((noinline)) void attend_tiles(const AttendArgs& args) {
  const Memory memory(args);
  const int64_t pairs = (args.rows + kTwo - 1) / kTwo, chunks = (args.keys + kTwo - 1) / kTwo;
  Stretches ahead = stretches_of_group(args, pairs * chunks * (args.d / 32));
  Tiled::begin_tiles();
  score_tiles<Tiled, kType>(args, memory, ahead);
  Stretches next = next_stretches(args, args.rows + pairs * (args.dv / kTwo) * chunks);
  soften<kType, Weights::kWords>(args, memory, next);
  value_tiles<Tiled, kType>(args, memory, next);
  Tiled::end_tiles();
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
