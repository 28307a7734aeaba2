// What attention over chosen keys takes (attention.h): an indexer's scores, the choice of the best, and the chosen keys
// brought together.
//
// Scores are attention's own products, heads in the place of query rows, so tile units serve them and every route gives
// the same bits; what follows is two operations for each head and key. The choice looks for a threshold bit by bit: at
// most 32 counts over scores that stay in L2, each one comparison a lane.
#pragma once
#include "kernels/attention.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

using kt::ChooseArgs;
using kt::GatherArgs;
using kt::IndexArgs;

template <class Any, KvType kType>
KT_INLINE void index_products(const AttendArgs& args, const Memory& memory) {
  constexpr From kFrom = from_of(kType);
  const int64_t passes = args.rows / kQueryRows + args.rows % kQueryRows, steps = (args.d + 31) / 32;
  Stretches ahead;
  for (int b = 1; b < blocks_of(args); ++b) ahead.add(args.k[b], kt::kv_bytes(kType) * kKvBlock * args.d);
  ahead.spread(passes * ((args.keys + kWide - 1) / kWide) * steps);
  if constexpr (Any::kTileUnit && kType != KvType::kF32)
    if (args.rows >= kNarrowRows) {
      Any::begin_tiles();
      score_tiles<Any, kType>(args, memory, ahead);
      Any::end_tiles();
      return;
    }
  for (int b = 0; b < blocks_of(args); ++b)
    score_block<kFrom>(args, memory, b * kKvBlock, block_at(args.k, b), ahead);
}

template <KvType kType>
__attribute__((noinline)) void index_rows(const IndexArgs& args) {
  const AttendArgs products{.type = kType,
                            .rows = args.heads,
                            .d = args.d,
                            .q = args.q,
                            .q_bf16 = args.q_bf16,
                            .k = args.k,
                            .keys = args.keys,
                            .scratch = args.scratch,
                            .sums = {}};
  const Memory memory(products);
  index_products<Isa, kType>(products, memory);
  const F32 zero = Isa::set1(0.0f);
  for (int j = 0; j < args.keys; j += Isa::kLanes) {
    F32 sum = zero;
    for (int h = 0; h < args.heads; ++h)
      sum = Isa::fma(Isa::set1(args.weights[h]), Isa::max(Isa::load(memory.scores(h) + j), zero), sum);
    if constexpr (kType == KvType::kS8) sum = Isa::mul(sum, Isa::load(scales_at(args.k, args.d, j)));
    Isa::store(args.scores + j, sum);
  }
}

// Whole numbers in the order of the floats they stand for.
KT_INLINE int32_t in_order(float x) {
  x += 0.0f;  // of zeros there is one
  int32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits ^ (bits >> 31 & INT32_MAX);
}

KT_INLINE int number_at(const float* from, int i) {
  int32_t x;
  __builtin_memcpy(&x, from + i, sizeof x);
  return x;
}

int count_from(const float* numbers, int count, int32_t least) {
  int found = 0;
  for (int i = 0; i < count; ++i) found += number_at(numbers, i) >= least;
  return found;
}

// Numbers of a key in a row of words: a word holds `kPack` keys' numbers of one column.
template <int kPack>
KT_INLINE void gather_values(const GatherArgs& args) {
  constexpr int kBits = 32 / kPack;
  constexpr uint32_t kMask = kPack == 1 ? UINT32_MAX : (1u << (kBits % 32)) - 1;
  for (int s = 0; s < kKvBlock; s += kPack) {
    uint32_t* to = static_cast<uint32_t*>(args.to) + int64_t{s / kPack} * args.width;
    for (int c = 0; c < args.width; ++c) to[c] = 0;
    for (int j = 0; j < kPack && s + j < args.count; ++j) {
      const int place = args.place[s + j];
      const uint32_t* from =
          static_cast<const uint32_t*>(args.from[s + j]) + int64_t{place / kPack} * args.width;
      const int down = place % kPack * kBits, up = j * kBits;
      for (int c = 0; c < args.width; ++c) to[c] |= (from[c] >> down & kMask) << up;
    }
  }
}

KT_INLINE void gather_keys(const GatherArgs& args, int words) {
  auto* to = static_cast<uint32_t*>(args.to);
  for (int w = 0; w < words; ++w)
    for (int s = 0; s < kKvBlock; ++s)
      to[w * kKvBlock + s] =
          s < args.count ? static_cast<const uint32_t*>(args.from[s])[w * kKvBlock + args.place[s]] : 0;
}

template <int kPack>
KT_INLINE void gather_block(const GatherArgs& args) {
  if (args.keys)
    gather_keys(args, args.width / kPack);
  else
    gather_values<kPack>(args);
}

KT_INLINE void gather_scales(const GatherArgs& args) {
  float scales[kKvBlock] = {};
  const int64_t at = int64_t{kKvBlock} * args.width;
  for (int s = 0; s < args.count; ++s)
    __builtin_memcpy(scales + s, static_cast<const uint8_t*>(args.from[s]) + at + 4 * args.place[s],
                     sizeof(float));
  __builtin_memcpy(static_cast<uint8_t*>(args.to) + at, scales, sizeof scales);
}

}  // namespace

void gather(const GatherArgs& args) noexcept {
  if (args.type == KvType::kF32) return gather_block<1>(args);
  if (args.type == KvType::kBf16) return gather_block<2>(args);
  gather_block<4>(args);
  gather_scales(args);
}

void index_scores(const IndexArgs& args) noexcept {
  if (args.type == KvType::kF32)
    index_rows<KvType::kF32>(args);
  else if (args.type == KvType::kBf16)
    index_rows<KvType::kBf16>(args);
  else
    index_rows<KvType::kS8>(args);
}

void choose(const ChooseArgs& args) noexcept {
  for (int i = 0; i < args.count; ++i) {
    const int32_t number = in_order(args.scores[i]);
    __builtin_memcpy(args.scores + i, &number, sizeof number);
  }
  // The largest number that `best` or more of them reach, and how many do.
  uint32_t above = 0;  // INT32_MIN
  int reach = args.count;
  for (int bit = 31; bit >= 0 && reach > args.best; --bit) {
    const uint32_t tried = above | 1u << bit;
    const int found = count_from(args.scores, args.count, static_cast<int32_t>(tried ^ 0x80000000u));
    if (found < args.best) continue;
    above = tried;
    reach = found;
  }
  const auto least = static_cast<int32_t>(above ^ 0x80000000u);
  int spare = reach - args.best;  // of those that are equal to it, the last ones are left out
  for (int word = (args.count - 1) / 64; word >= 0; --word) {
    const int first = word * 64, some = args.count - first < 64 ? args.count - first : 64;
    uint64_t bits = 0;
    for (int i = 0; i < some; ++i) bits |= uint64_t{number_at(args.scores, first + i) >= least} << i;
    for (int i = some - 1; i >= 0 && spare > 0; --i)
      if (number_at(args.scores, first + i) == least) {
        bits &= ~(uint64_t{1} << i);
        --spare;
      }
    args.seen[word] = bits;
  }
}

}  // namespace KT_ISA_NAMESPACE
