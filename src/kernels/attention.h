// Kernels of attention over a cache of keys and values: layouts, and the functions every ISA exports.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kt {

enum class KvType : uint8_t { kF32, kBf16, kS8 };  // of cached keys and values; kS8: a scale for each key
constexpr int kv_bytes(KvType type) { return type == KvType::kF32 ? 4 : type == KvType::kBf16 ? 2 : 1; }
constexpr int kv_pack(KvType type) { return 4 / kv_bytes(type); }  // numbers of a 4-byte word

inline constexpr int kKvBlock = 64;    // keys that lie together
inline constexpr int kKvColumns = 32;  // d and dv are padded to multiples of this, with zeros
// A block of keys, in words of `pack` numbers: [d / pack, kKvBlock, pack], so that the words of all keys
// stand side by side: neither a vector nor a tile has to sum across. A block of values: [kKvBlock / pack, dv,
// pack], words of the same column of neighbouring keys. Behind either: f32 scales [kKvBlock], for kS8.
constexpr int64_t key_place(int pack, int key, int column) {
  return (int64_t{column / pack} * kKvBlock + key) * pack + column % pack;
}
constexpr int64_t value_place(int pack, int width, int key, int column) {
  return (int64_t{key / pack} * width + column) * pack + key % pack;
}

// Softmax attention of query rows over one block, added to running sums, so that a caller walks any number of
// blocks in order and divides by `sum` at the end:
//   s = q . k (q is scaled already); top' = max(top, s); p = e^(s - top'); sum = sum * e^(top - top') + p;
//   out likewise
// A row's result does not depend on the other rows of the call, to the bit, as long as all values of the
// block are finite, those of keys it does not see too: they count with weight 0. Scores that are no numbers
// give such rows. With kBf16, q has to be numbers that bf16 holds, and p is rounded to bf16.
struct AttendArgs {
  KvType type = KvType::kBf16;
  int rows = 0, d = 0, dv = 0;
  const float* q = nullptr;      // [rows, d]
  const void* q_bf16 = nullptr;  // the same as bf16, [rows rounded up to 16, d]; for kBf16
  const void* k = nullptr;
  const void* v = nullptr;
  int v_width = 0;                  // columns of the block of values; at least dv
  const float* k_scales = nullptr;  // [kKvBlock], for kS8
  const float* v_scales = nullptr;
  int keys = 0;  // that any row sees; the first ones of the block
  // Blocks the caller will ask about next, to be fetched meanwhile; null: none.
  const void* next_k = nullptr;
  const void* next_v = nullptr;
  int64_t next_k_bytes = 0, next_v_bytes = 0;
  const int32_t* begin = nullptr;  // [rows] keys [begin, end) of the block are seen
  const int32_t* end = nullptr;
  float* scores = nullptr;  // [rows rounded up to 16, kKvBlock], scratch
  void* weights = nullptr;  // bf16 of the same shape, scratch; for kBf16
  float* shrink = nullptr;  // [rows], scratch
  float* top = nullptr;     // [rows], starts at -infinity
  float* sum = nullptr;     // [rows], starts at 0
  float* out = nullptr;     // [rows, dv], starts at 0
};

struct AttentionKernels {
  void (*attend)(const AttendArgs&) noexcept;
  // A query as attend wants it: [columns] times scale, zeros up to d; for kBf16 rounded, and as bf16 too.
  void (*query)(KvType type, const float* from, int columns, float scale, int d, float* q,
                void* q_bf16) noexcept;
  // y = y * y_factor + x * x_factor, n a multiple of kKvColumns: joins what two stretches of keys gave.
  void (*join)(float* y, float y_factor, const float* x, float x_factor, int n) noexcept;
  // A block of keys made from a block of values of the same numbers, `width` columns.
  void (*keys_of_values)(KvType type, const void* values, int width, void* keys) noexcept;
};

}  // namespace kt
