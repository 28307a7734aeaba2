// Kernels of attention over a cache of keys and values: layouts, and the functions every ISA exports.
#pragma once
#include <cstddef>
#include <cstdint>

#include "formats/kv_type.h"

namespace kt::inline kernels {

constexpr int kv_pack(KvType type) { return 4 / kv_bytes(type); }  // numbers of a 4-byte word

inline constexpr int kGroupBlocks = 4;  // that one call takes
inline constexpr int kGroupKeys = kGroupBlocks * kKvBlock;
// A block of keys, in words of `pack` numbers: [d / pack, kKvBlock, pack], so that the words of all keys
// stand side by side: neither a vector nor a tile has to sum across. A block of values: [kKvBlock / pack, dv,
// pack], words of the same column of neighbouring keys. Behind either: f32 scales [kKvBlock], for kS8.
constexpr int64_t key_place(int pack, int key, int column) {
  return (int64_t{column / pack} * kKvBlock + key) * pack + column % pack;
}
constexpr int64_t value_place(int pack, int width, int key, int column) {
  return (int64_t{key / pack} * width + column) * pack + key % pack;
}

// What a stretch of keys gave to rows, in one piece of floats.
//   top [rows rounded up to 16]  a whole number near the largest score, or kSawNothing
//   sum [rows rounded up to 16]  of 2^(score - top); 0 where a row sees no key of the stretch
//   out [rows, dv]               of 2^(score - top) * value
inline constexpr int kSumRows = 16;
inline constexpr float kSawNothing = -3.0e38f;
struct AttendSums {
  float* top = nullptr;
  float* sum = nullptr;
  float* out = nullptr;

  static constexpr int64_t padded(int rows) { return (int64_t{rows} + kSumRows - 1) / kSumRows * kSumRows; }
  static constexpr int64_t floats(int rows, int dv) { return 2 * padded(rows) + int64_t{rows} * dv; }
  static AttendSums in(float* memory, int rows) {
    return {memory, memory + padded(rows), memory + 2 * padded(rows)};
  }
};

// Softmax attention of query rows over a group of neighbouring blocks:
//   s = q . k, a logarithm to base 2 (`query` scales so); top = max(s) to the nearest whole number;
//   p = 2^(s - top), 0 where s - top < -100; sum = sum of p; out = sum of p * v
// and, unless the group is the first, joined behind what the rows gathered before, as `merge` and `join` do:
// factors are powers of two, so the tops bring no rounding.
//
// A row's result does not depend on the other rows of the call, nor on blocks before or behind the keys it sees, to
// the bit, as long as all values of the blocks are finite (with kS8 their scales too), those of keys it does not see
// included: they count with weight 0. Keys that are not seen may be anything. Scores that are no numbers give such
// rows. With kBf16 and kS8, q has to be numbers that bf16 holds, and what values are multiplied with is rounded to
// bf16: p, or with kS8 p times the value's scale; sum takes the rounded ones too.
struct AttendArgs {
  KvType type = KvType::kBf16;
  int rows = 0, d = 0, dv = 0;
  const float* q = nullptr;      // [rows, d] as `query` makes it
  const void* q_bf16 = nullptr;  // [rows rounded up to 16, d], likewise; not for kF32
  const void* const* k =
      nullptr;  // blocks [keys / kKvBlock, rounded up]; null: the values are the keys, v_width is d
  const void* const* v = nullptr;
  int v_width = 0;  // columns of a block of values; at least dv
  int keys = 0;     // of the blocks, that any row sees: the first ones; 1 to kGroupKeys
  // Stretches the caller will ask about next, to be fetched meanwhile, at most kGroupBlocks.
  const void* const* next = nullptr;
  int next_count = 0;
  int64_t next_bytes = 0;          // of each
  const int32_t* begin = nullptr;  // [rows] keys [begin, end) are seen, counted from the first block
  const int32_t* end = nullptr;
  bool first = true;        // sums are written; false: joined to what is there
  void* scratch = nullptr;  // attend_scratch_bytes, aligned to 64
  AttendSums sums;
};

// Of AttendArgs::scratch, one after the other; the last only for keys that are made of values (`shared`):
//   scores and weights of all rows
//   sums of the group
//   scales of values
//   a stretch of keys or values as numbers of another type
//   keys made of values
inline constexpr int kScoreFloats =
    kGroupKeys + kGroupKeys / 2 + 16;  // of a row; a stride that visits every set of L1
constexpr size_t attend_scratch_bytes(KvType type, int rows, int d, bool shared) {
  const auto tiles = static_cast<size_t>(AttendSums::padded(rows));
  const auto wide = static_cast<size_t>(d > kGroupKeys ? d : kGroupKeys);
  const size_t keys = static_cast<size_t>(kKvBlock) * static_cast<size_t>(d) * (type == KvType::kF32 ? 4 : 2);
  return (tiles * (kScoreFloats + 2) + 2 * kGroupKeys) * sizeof(float) + wide * 32 * sizeof(float) +
         (shared ? keys : 0);
}

// Rows [row, end) of `count` stretches that lie one after the other, each as AttendSums has it, joined in order into
// the first; top and sum of the others are the factors that `merge` made of them.
struct JoinArgs {
  float* parts = nullptr;  // [count][AttendSums::floats(rows, dv)]
  int count = 0, rows = 0, dv = 0;
  int row = 0, end = 0;
};

// Chosen keys of one head, gathered from blocks of the cache into one block in the order they are named: what attends
// then reads no others. Numbers stay what they are, scales (kS8) too; places behind the last one become zeros.
struct GatherArgs {
  KvType type = KvType::kBf16;
  bool keys = false;                  // the blocks are of keys, else of values
  int width = 0;                      // columns of a block
  int count = 0;                      // of keys, 1 to kKvBlock
  const void* const* from = nullptr;  // [count] blocks
  const uint8_t* place = nullptr;     // [count] of each key in its block
  void* to = nullptr;
};

// What an indexer gives each key of a group of neighbouring blocks: the sum over heads, in their order, of
// weight * max(q . k, 0). A key's score does not depend on the other keys, to the bit. Keys behind the last one may be
// anything, and so is their score.
struct IndexArgs {
  KvType type = KvType::kBf16;
  int heads = 0, d = 0;
  const float* q = nullptr;        // [heads, d] as `query` makes it
  const void* q_bf16 = nullptr;    // [heads rounded up to 16, d], likewise; not for kF32
  const float* weights = nullptr;  // [heads]
  const void* const* k = nullptr;  // blocks of keys
  int keys = 0;                    // 1 to kGroupKeys
  void* scratch = nullptr;         // attend_scratch_bytes of so many rows, not shared; aligned to 64
  float* scores = nullptr;         // [keys rounded up to kKvBlock]
};

// The `best` largest of `count` scores, 0 < best < count; of equal ones, as all zeros are, those that come first.
struct ChooseArgs {
  float* scores = nullptr;  // spent
  int count = 0, best = 0;
  uint64_t* seen = nullptr;  // [count / 64, rounded up] out: a bit for each
};

struct AttentionKernels {
  int narrow_rows;  // from so many rows on, attend takes q_bf16 alone, except with kF32
  int most_rows;    // 128 or 256: of a call, for what all rows share to be little; scratch of more leaves L2
  void (*attend)(const AttendArgs&) noexcept;
  // A query as attend wants it: [columns] times scale and log2(e), zeros up to d. For kBf16 and kS8 rounded, even
  // columns first, then odd ones, and as bf16 in their order; q null: as bf16 alone.
  void (*query)(KvType type, const float* from, int columns, float scale, int d, float* q,
                void* q_bf16) noexcept;
  // What rows gathered in two stretches, `rows` a multiple of kSumRows: top and sum become those of both, next_top
  // the factor of the first stretch's out, next_sum that of the second's.
  void (*merge)(int rows, float* top, float* sum, float* next_top, float* next_sum) noexcept;
  void (*join)(const JoinArgs&) noexcept;
  // A block of keys made from a block of values of the same numbers, `width` columns; kF32 or kBf16.
  void (*keys_of_values)(KvType type, const void* values, int width, void* keys) noexcept;
  void (*gather)(const GatherArgs&) noexcept;
  void (*index_scores)(const IndexArgs&) noexcept;  // from narrow_rows on takes q_bf16 alone, as attend
  void (*choose)(const ChooseArgs&) noexcept;
};

}  // namespace kt::inline kernels
