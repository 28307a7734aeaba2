// Blocks of keys and values as the routes of attention take them: numbers of a word, words widened into plain numbers
// or bf16, values turned into keys; and the memory of a call.
#pragma once
#include "kernels/attention.h"
#include "kernels/math.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

using kt::AttendArgs;
using kt::AttendSums;
using kt::JoinArgs;
using kt::kGroupKeys;
using kt::kKvBlock;
using kt::kScoreFloats;
using kt::KvType;

inline constexpr int kVectors = Isa::kLanes == 8 ? 1 : 2;  // side by side: half the registers of AVX2
inline constexpr int kWide = kVectors * Isa::kLanes;       // keys or columns of a pass
inline constexpr int kScoresAt = kGroupKeys / 2;  // of a row of scratch; weights grow before and over them

// What a pass over rows takes. kPlain: numbers [numbers, kWide], two of which are a word.
enum class From { kF32, kBf16, kS8, kPlain };
inline constexpr int64_t kWideStride = 2 * kWide * 4;  // bytes of such a word
constexpr From from_of(KvType type) {
  return type == KvType::kF32 ? From::kF32 : type == KvType::kBf16 ? From::kBf16 : From::kS8;
}
constexpr int pack_of(From from) { return from == From::kF32 ? 1 : from == From::kS8 ? 4 : 2; }

template <From kFrom>
KT_INLINE void load_numbers(const uint8_t* at, F32 (&out)[pack_of(kFrom)]) {
  if constexpr (kFrom == From::kF32) {
    out[0] = Isa::load(reinterpret_cast<const float*>(at));
  } else if constexpr (kFrom == From::kPlain) {
    out[0] = Isa::load(reinterpret_cast<const float*>(at));
    out[1] = Isa::load(reinterpret_cast<const float*>(at) + kWide);
  } else {
    const I32 words = Isa::load(reinterpret_cast<const int32_t*>(at));
    if constexpr (kFrom == From::kBf16) {
      out[0] = Isa::low_bf16(words);
      out[1] = Isa::high_bf16(words);
    } else {
      unroll<4>([&](auto j) __attribute__((always_inline)) { out[j] = Isa::template byte_s8<j>(words); });
    }
  }
}

// kWide columns of words, as From::kPlain has them.
template <From kFrom>
KT_INLINE void widen(const uint8_t* w, int64_t w_stride, int words, float* out) {
  constexpr int kPack = pack_of(kFrom);
  for (int s = 0; s < words; ++s, out += kPack * kWide)
    unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
      F32 numbers[kPack];
      load_numbers<kFrom>(w + s * w_stride + v * Isa::kLanes * 4, numbers);
      unroll<kPack>([&](auto j) __attribute__((always_inline)) {
        Isa::store(out + j * kWide + v * Isa::kLanes, numbers[j]);
      });
    });
}

// `columns` columns of words of s8, a multiple of 2 * kLanes, as words of bf16: two rows of them for each.
KT_INLINE void widen_s8(const uint8_t* from, int64_t from_stride, int words, int columns, uint8_t* to,
                        int64_t to_stride) {
  for (int s = 0; s < words; ++s, from += from_stride, to += 2 * to_stride)
    for (int c = 0; c < columns * 4; c += Isa::kLanes * 4) {
      I32 two[2];
      Isa::s8_bf16(Isa::load(reinterpret_cast<const int32_t*>(from + c)), two);
      Isa::store(reinterpret_cast<int32_t*>(to + c), two[0]);
      Isa::store(reinterpret_cast<int32_t*>(to + to_stride + c), two[1]);
    }
}

// Pieces of AttendArgs::scratch.
struct Memory {
  explicit KT_INLINE Memory(const AttendArgs& args) {
    const int64_t rows = AttendSums::padded(args.rows);
    all = static_cast<float*>(args.scratch);
    top = all + rows * kScoreFloats;
    sum = top + rows;
    scales = sum + rows;
    inverse = scales + kGroupKeys;
    wide = reinterpret_cast<uint8_t*>(inverse + kGroupKeys);
    keys = wide + int64_t{args.d > kGroupKeys ? args.d : kGroupKeys} * 128;
  }
  KT_INLINE float* weights(int row) const { return all + int64_t{row} * kScoreFloats; }
  KT_INLINE float* scores(int row) const { return weights(row) + kScoresAt; }
  KT_INLINE float* wide_floats() const { return reinterpret_cast<float*>(wide); }

  float* all;      // [rows rounded up to 16, kScoreFloats]
  float* top;      // [rows rounded up to 16] of the group; then the factor of what was there
  float* sum;      // likewise; then the factor of the group
  float* scales;   // [kGroupKeys] of values, with kS8
  float* inverse;  // 1 / those, of even keys, then of odd ones
  uint8_t* wide;
  uint8_t* keys;  // a block, where values are the keys
};

KT_INLINE const uint8_t* block_at(const void* const* blocks, int b) {
  return static_cast<const uint8_t*>(blocks[b]);
}
KT_INLINE int blocks_of(const AttendArgs& args) { return (args.keys + kKvBlock - 1) / kKvBlock; }

// Stretches of memory to be had in L2 soon, a few lines at each step.
struct Stretches {
  static constexpr int kMost = 2 * kt::kGroupBlocks;
  const uint8_t* at[kMost];
  int64_t bytes[kMost];
  static constexpr int64_t kFour = 4 * 64;
  int count = 0, now = 0;
  int64_t done = 0, each = 0;

  KT_INLINE void add(const void* from, int64_t size) {
    at[count] = static_cast<const uint8_t*>(from);
    bytes[count++] = size;
  }
  KT_INLINE void spread(int64_t steps) {
    int64_t all = 0;
    for (int i = 0; i < count; ++i) all += bytes[i];
    each = (all / (steps > 0 ? steps : 1) / kFour + 1) * kFour;
  }
  // Four lines at a time, up to three past a stretch.
  KT_INLINE void fetch() {
    if (now >= count) return;
    const int64_t end = done + each < bytes[now] ? done + each : bytes[now];
    for (const uint8_t *from = at[now] + done, *to = at[now] + end; from < to; from += kFour)
      unroll<4>([&](auto i) __attribute__((always_inline)) { __builtin_prefetch(from + 64 * i, 0, 2); });
    done += each;
    if (done >= bytes[now]) {
      ++now;
      done = 0;
    }
  }
};

// The blocks of the group itself, to be fetched over so many steps while its first one is scored: keys before values.
KT_INLINE Stretches stretches_of_group(const AttendArgs& args, int64_t steps) {
  const int64_t size = kt::kv_bytes(args.type) * kKvBlock;
  Stretches out;
  for (int b = 0; b < blocks_of(args); ++b) {
    if (args.k && b + 1 < blocks_of(args)) out.add(args.k[b + 1], size * args.d);
    if (args.k || b > 0) out.add(args.v[b], size * args.v_width);
  }
  out.spread(steps);
  return out;
}

KT_INLINE Stretches next_stretches(const AttendArgs& args, int64_t steps) {
  Stretches out;
  for (int i = 0; i < args.next_count; ++i) out.add(args.next[i], args.next_bytes);
  out.spread(steps);
  return out;
}

}  // namespace

void keys_of_values(KvType type, const void* values, int width, void* keys) noexcept {
  const auto* from = static_cast<const uint8_t*>(values);
  auto* to = static_cast<uint8_t*>(keys);
  if (type == KvType::kBf16) {
    constexpr int kTurn = Isa::kTurn;
    const int64_t stride = int64_t{width} * 4;
    for (int pair = 0; pair < kKvBlock / 2; pair += kTurn)
      for (int c = 0; c < width / 2; c += kTurn)
        Isa::turn(from + pair * stride + c * 8, stride, to + (int64_t{c} * kKvBlock + 2 * pair) * 4,
                  kKvBlock * 4);
  } else {
    for (int key = 0; key < kKvBlock; ++key)
      for (int c = 0; c < width; ++c)
        std::memcpy(to + (int64_t{c} * kKvBlock + key) * 4, from + (int64_t{key} * width + c) * 4, 4);
  }
}

namespace {

// Keys made of the values of a block: bf16 ones of s8.
template <KvType kType>
KT_INLINE const uint8_t* shared_keys(const AttendArgs& args, const Memory& memory, int b) {
  const uint8_t* values = block_at(args.v, b);
  if constexpr (kType == KvType::kS8) {
    const int64_t stride = int64_t{args.d} * 4;
    widen_s8(values, stride, kKvBlock / 4, args.d, memory.wide, stride);
    values = memory.wide;
  }
  keys_of_values(kType == KvType::kF32 ? kType : KvType::kBf16, values, args.d, memory.keys);
  return memory.keys;
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
