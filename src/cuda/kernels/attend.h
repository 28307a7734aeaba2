// Attention on matrix units: what its kernels share. Queries times the root of their scale are operand A of scores,
// weights of keys operand A of values, both in bf16; cached keys and values are operand B as they lie in memory,
// widened to bf16 where they are int8. Sums are f32. Scores are logarithms to base 2.
//
// Which columns an instruction adds up, and in which order it gives them, is free as long as both sides agree: so a
// lane takes 16 neighbouring bytes of a key. Scores come as the operand that values want: lane 4 i + j has rows i and i
// + 8.
#pragma once
#include "cuda/kernels/seen.h"

namespace kt::inline cuda {

constexpr float kLog2E = 1.44269504f;

// What is gathered of rows i and i + 8; a lane has the sum of its own keys' weights.
struct Running {
  float top[2] = {kSawNothing, kSawNothing}, sum[2] = {0, 0};
};
// Keys that a row sees, by their number in a tile.
struct SeenKeys {
  int least, most;
};

// Scores of 8 kTiles keys become weights; `old` is what the numbers gathered before are to be multiplied by.
template <int kTiles>
KT_GPU void weigh(float (&scores)[kTiles][4], const SeenKeys (&seen)[2], Running& all, float (&old)[2]) {
  const int j = gpu::thread() % 4;
  float top[2] = {all.top[0], all.top[1]};
  KT_UNROLL(kTiles)
  for (int n = 0; n < kTiles; ++n) {
    KT_UNROLL(4)
    for (int e = 0; e < 4; ++e) {
      const int key = n * 8 + 2 * j + e % 2;
      float& score = scores[n][e];
      if (key < seen[e / 2].least || key > seen[e / 2].most) score = kSawNothing;
      top[e / 2] = score > top[e / 2] ? score : top[e / 2];
    }
  }
  float base[2];
  KT_UNROLL(2)
  for (int r = 0; r < 2; ++r) {
    KT_UNROLL(2)
    for (int mask = 1; mask < 4; mask *= 2) {
      const float other = gpu::shuffle_xor(top[r], mask);
      top[r] = other > top[r] ? other : top[r];
    }
    base[r] = top[r] > kSawNothing ? top[r] : 0.0f;
    old[r] = gpu::exp2(all.top[r] - base[r]);
    all.top[r] = top[r];
    all.sum[r] *= old[r];
  }
  KT_UNROLL(kTiles)
  for (int n = 0; n < kTiles; ++n) {
    KT_UNROLL(4)
    for (int e = 0; e < 4; ++e) {
      scores[n][e] = gpu::exp2(scores[n][e] - base[e / 2]);
      all.sum[e / 2] += scores[n][e];
    }
  }
}

// Two codes of int8, in the lower bytes of both halves, as bf16: 128 and the lower seven bits, less 128 or 256.
KT_GPU uint32_t widen_codes(uint32_t halves) {
  return gpu::subtract_pairs((halves & 0x007F007Fu) | 0x43004300u, (halves & 0x00800080u) | 0x43004300u);
}

// Columns of 16 bytes.
template <KvType kType>
constexpr int kRun = 16 / kv_bytes(kType);

// Operand B of scores: the m-th four of a lane's columns.
template <KvType kType>
KT_GPU gpu::Words2 key_pairs(const gpu::Words& key, int m) {
  if constexpr (kType == KvType::kBf16)
    return {{key.word[2 * m], key.word[2 * m + 1]}};
  else
    return {{widen_codes(gpu::permute(key.word[m], 0, 0x4140)),
             widen_codes(gpu::permute(key.word[m], 0, 0x4342))}};
}

// Operand B of values: the t-th of a lane's columns, of its keys 2 j, 2 j + 1, 2 j + 8 and 2 j + 9.
template <KvType kType>
KT_GPU gpu::Words2 value_pairs(const gpu::Words (&of)[4], int t) {
  if constexpr (kType == KvType::kBf16) {
    const uint32_t selector = t % 2 == 0 ? 0x5410 : 0x7632;
    return {{gpu::permute(of[0].word[t / 2], of[1].word[t / 2], selector),
             gpu::permute(of[2].word[t / 2], of[3].word[t / 2], selector)}};
  } else {
    const auto selector = static_cast<uint32_t>(t % 4 | (4 + t % 4) << 8);
    return {{widen_codes(gpu::permute(of[0].word[t / 4], of[1].word[t / 4], selector)),
             widen_codes(gpu::permute(of[2].word[t / 4], of[3].word[t / 4], selector))}};
  }
}

// Four columns of a row of queries from `column` on, as bf16; zeros behind the last.
KT_GPU gpu::Words2 query_four(const float* row, int column, int columns, float scale) {
  float x[4];
  KT_UNROLL(4)
  for (int i = 0; i < 4; ++i) x[i] = row && column + i < columns ? row[column + i] * scale : 0.0f;
  return {{gpu::bf16_pair(x[0], x[1]), gpu::bf16_pair(x[2], x[3])}};
}
// Operand A of scores: four columns of rows i and i + 8; null: there is no such row.
KT_GPU gpu::Words query_operand(const float* row, const float* row8, int column, int columns, float scale) {
  const gpu::Words2 a = query_four(row, column, columns, scale), b = query_four(row8, column, columns, scale);
  return {{a.word[0], b.word[0], a.word[1], b.word[1]}};
}

// What blocks take of the rows from args.first on: a row's heads, then its groups.
struct AttendPlace {
  Seen seen;
  int group, first_page, end;  // pages [first_page, end)
  bool there;
};
KT_GPU AttendPlace attend_place(const AttendMatrixArgs& args, int most_heads) {
  const int groups = args.rows.groups, token = args.first + gpu::block_y() / groups;
  AttendPlace out{seen_by_block(args.rows, token, gpu::block(), most_heads), gpu::block_y() % groups, 0, 0,
                  true};
  if (args.whole) out.seen.group = out.seen.pages;
  out.there = live(args.rows.places, token) && out.group < out.seen.groups();
  out.first_page = out.seen.first_page + out.group * out.seen.group;
  const int end = out.first_page + out.seen.group, last = out.seen.first_page + out.seen.pages;
  out.end = end < last ? end : last;
  return out;
}

// Keys of a group's pages that a row sees, by their number in a page whose first is `first`.
KT_GPU SeenKeys seen_of_page(const Seen& seen, int first) {
  return {seen.oldest - first, seen.position - first};
}

// What a row gets of one group that saw (top, sum): numbers times `factor`, over `sum`.
struct RowShare {
  float factor, sum;
};
KT_GPU RowShare share_of(const AttendRowsArgs& args, int head, float top, float sum) {
  if (!args.sinks) return {1.0f, sum};
  const float sink = args.sinks[head] * kLog2E, most = sink > top ? sink : top;
  const float factor = gpu::exp2(top - most);
  return {factor, factor * sum + gpu::exp2(sink - most)};
}
KT_GPU int64_t part_at(const AttendMatrixArgs& args, int token, int head, int group) {
  return (int64_t{token - args.first} * args.rows.heads + head) * args.rows.groups + group;
}

// Four columns of a head, of the group that (top, sum) are of.
KT_GPU void store_four(const AttendMatrixArgs& args, const AttendPlace& place, int head, int column,
                       float top, float sum, const float (&x)[4]) {
  const AttendRowsArgs& rows = args.rows;
  if (rows.groups > 1) {
    if (column >= rows.plane.dv_pad) return;
    const int64_t at = part_at(args, place.seen.token, head, place.group);
    gpu::store16(rows.parts + at * rows.plane.dv_pad + column,
                 {{gpu::bits_of(x[0]), gpu::bits_of(x[1]), gpu::bits_of(x[2]), gpu::bits_of(x[3])}});
    if (column != 0) return;
    args.stats[at * 2] = top;
    args.stats[at * 2 + 1] = sum;
    return;
  }
  const RowShare share = share_of(rows, head, top, sum);
  float* const out = rows.out + place.seen.token * rows.out_width + head * rows.plane.dv;
  KT_UNROLL(4)
  for (int i = 0; i < 4; ++i)
    if (column + i < rows.plane.dv) out[column + i] = x[i] * share.factor / share.sum;
}

// Rows that are nobody's have no keys.
KT_GPU void store_nothing(const AttendMatrixArgs& args, const Seen& seen) {
  const AttendRowsArgs& rows = args.rows;
  if (rows.groups > 1 || live(rows.places, seen.token)) return;
  float* const out = rows.out + seen.token * rows.out_width + seen.head * rows.plane.dv;
  for (int i = gpu::thread(); i < seen.heads * rows.plane.dv; i += gpu::threads()) out[i] = 0.0f;
}

}  // namespace kt::inline cuda
