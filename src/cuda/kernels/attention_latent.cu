// Attention of heads that all read the same latent vectors, whose first columns are the values too (MLA), on matrix
// units (attend.h). A block of four warps takes 32 heads and a group of pages, 16 keys at a time from the block's
// memory. A warp has 128 columns of values to itself, for all heads, and of the scores it adds up the same columns and
// a quarter of those behind the values: its share of the queries stays in registers. The shares are summed up in
// memory, where a warp makes weights of 8 heads.
#include "cuda/kernels/attend.h"

namespace kt::inline cuda {

constexpr int kLatentWarps = 4, kLatentKeys = 16, kBoth = kLatentHeads / 16;
constexpr int kOwnColumns = kLatentValues / kLatentWarps;                    // of a warp
constexpr int kBehind = (kLatentColumns - kLatentValues) / kLatentWarps;     // of a warp, behind the values
constexpr int kSteps = (kOwnColumns + kBehind) / 16;                         // of 16 columns
constexpr int kKeyRow = kLatentColumns * 2 / 16, kCodeRow = kLatentColumns / 16;  // Words
constexpr int kScoreStride = kLatentKeys + 4;                                // a few more, for the banks
static_assert(kBehind == 16 && kOwnColumns == 128 && kBoth == 2);

// Memory of a block. int8 codes arrive in `codes` and become bf16 in the first tile.
struct LatentShared {
  gpu::Words* tiles;   // [2][kLatentKeys][kKeyRow]
  gpu::Words* codes;   // [2][kLatentKeys][kCodeRow], where the second tile would be
  float* scores;       // [warps][heads][kScoreStride]
  gpu::Words* weights; // [kBoth][lane], operand A of values
  float* old;          // [heads]
};

// Where Words `word` of a key stand: turned so that lanes read different banks, those with neighbouring keys and
// neighbouring Words for scores as well as those with every second key for values.
KT_GPU int key_word(int key, int word) { return key * kKeyRow + (word ^ ((key & 6) ^ (key & 1) << 2)); }

// Which keys a block takes, in tiles: those that its row sees of a group.
struct LatentTiles {
  const AttendRowsArgs& args;
  const Seen& seen;
  const int32_t* numbers;
  int first, end;

  KT_GPU const uint8_t* page(int tile) const {
    return args.plane.memory + numbers[tile * kLatentKeys / kKvBlock] * args.plane.page_bytes;
  }
  KT_GPU int slot(int tile) const { return tile * kLatentKeys % kKvBlock; }
  KT_GPU bool sees(int tile, int key) const {
    const int position = tile * kLatentKeys + key;
    return position >= seen.oldest && position <= seen.position;
  }
};

// A tile's keys on their way to memory, 8 threads for each; zeros for those that are not seen.
template <KvType kType>
KT_GPU void copy_keys(const LatentTiles& tiles, int tile, const LatentShared& shared) {
  constexpr int kWords = kType == KvType::kBf16 ? kKeyRow : kCodeRow;
  const int thread = gpu::thread_again(), key = thread / 8, first = thread % 8,
            words = tiles.args.plane.d_pad / kRun<kType>;
  const bool there = tiles.sees(tile, key);
  const uint8_t* const row = tiles.page(tile) + (tiles.slot(tile) + key) * words * static_cast<int>(sizeof(gpu::Words));
  gpu::Words* const to = kType == KvType::kBf16 ? shared.tiles + tile % 2 * kLatentKeys * kKeyRow
                                                : shared.codes + tile % 2 * kLatentKeys * kCodeRow + key * kCodeRow;
  KT_UNROLL(9)
  for (int word = first; word < kWords; word += 8) {
    if (word >= words) continue;
    gpu::Words* const at = kType == KvType::kBf16 ? to + key_word(key, word) : to + word;
    if (there)
      gpu::copy16(at, row + word * sizeof(gpu::Words));
    else
      gpu::store16(at, {});
  }
  gpu::end_copies();
}

// int8 codes of a tile to bf16.
KT_GPU void widen_keys(const CachePlane& plane, int tile, const LatentShared& shared) {
  const int key = gpu::thread() / 8;
  const gpu::Words* const from = shared.codes + (tile % 2 * kLatentKeys + key) * kCodeRow;
  KT_UNROLL(1)
  for (int word = gpu::thread() % 8; word * 16 < plane.d_pad; word += 8) {
    const gpu::Words codes = from[word];
    KT_UNROLL(2)
    for (int half = 0; half < 2; ++half) {
      const gpu::Words2 a = key_pairs<KvType::kS8>(codes, half * 2), b = key_pairs<KvType::kS8>(codes, half * 2 + 1);
      shared.tiles[key_word(key, word * 2 + half)] = {{a.word[0], a.word[1], b.word[0], b.word[1]}};
    }
  }
}

// A warp's columns of the queries.
KT_GPU void load_latent_queries(const AttendRowsArgs& args, const Seen& seen, gpu::Words (&query)[kBoth][kSteps]) {
  const int warp = gpu::thread() / gpu::kWarp, i = gpu::thread() % gpu::kWarp / 4, j = gpu::thread() % 4;
  const int d = args.plane.d;
  KT_UNROLL(2)
  for (int b = 0; b < kBoth; ++b) {
    const int head = b * 16 + i;
    const float* const first = args.q + seen.token * args.q_width + (seen.head + head) * d;
    const float* const row = head < seen.heads ? first : nullptr;
    const float* const row8 = head + 8 < seen.heads ? first + 8 * d : nullptr;
    KT_UNROLL(9)
    for (int s = 0; s < kSteps; ++s) {
      const int column = s < kSteps - 1 ? warp * kOwnColumns + s / 2 * 32 + j * 8 + s % 2 * 4
                                        : kLatentValues + warp * kBehind + j * 4;
      query[b][s] = query_operand(row, row8, column, d, args.scale * kLog2E);
    }
  }
}

// The warp's share of a tile's scores.
KT_GPU void score_tile(const CachePlane& plane, const gpu::Words* tile, const gpu::Words (&query)[kBoth][kSteps],
                       float* scores) {
  const int thread = gpu::thread_again(), warp = thread / gpu::kWarp, i = thread % gpu::kWarp / 4, j = thread % 4;
  float sums[2][kBoth][4] = {};
  KT_UNROLL(4)
  for (int c = 0; c < kOwnColumns / 32; ++c) {
    if (warp * kOwnColumns + c * 32 >= plane.d_pad) continue;
    KT_UNROLL(2)
    for (int n = 0; n < 2; ++n) {
      const gpu::Words key = tile[key_word(n * 8 + i, warp * (kOwnColumns / 8) + c * 4 + j)];
      KT_UNROLL(2)
      for (int b = 0; b < kBoth; ++b) {
        gpu::multiply_add(sums[n][b], query[b][c * 2], {{key.word[0], key.word[1]}});
        gpu::multiply_add(sums[n][b], query[b][c * 2 + 1], {{key.word[2], key.word[3]}});
      }
    }
  }
  if (kLatentValues + warp * kBehind < plane.d_pad) {
    KT_UNROLL(2)
    for (int n = 0; n < 2; ++n) {
      const gpu::Words* const at = tile + key_word(n * 8 + i, (kLatentValues + warp * kBehind) / 8 + j / 2);
      const gpu::Words2 key = gpu::load8(reinterpret_cast<const uint8_t*>(at) + j % 2 * 8);
      KT_UNROLL(2)
      for (int b = 0; b < kBoth; ++b) gpu::multiply_add(sums[n][b], query[b][kSteps - 1], key);
    }
  }
  KT_UNROLL(2)
  for (int n = 0; n < 2; ++n)
    for (int b = 0; b < kBoth; ++b)
      for (int r = 0; r < 2; ++r)
        gpu::store8(scores + (warp * kLatentHeads + b * 16 + i + r * 8) * kScoreStride + n * 8 + j * 2,
                    {{gpu::bits_of(sums[n][b][r * 2]), gpu::bits_of(sums[n][b][r * 2 + 1])}});
}

// Of the lane's head: number 8 warp + lane / 4; its keys are four neighbours.
struct LatentRow {
  float top = kSawNothing, sum = 0;
};
struct FourScales {
  float of[4] = {1, 1, 1, 1};
};
// Scales of the lane's keys, of those that are seen.
template <KvType kType>
KT_GPU FourScales key_scales(const LatentTiles& tiles, int tile) {
  FourScales out;
  if constexpr (kType == KvType::kS8) {
    const int key = gpu::thread() % 4 * 4;
    const auto* const from = reinterpret_cast<const float*>(tiles.page(tile) + kKvBlock * tiles.args.plane.d_pad);
    KT_UNROLL(4)
    for (int k = 0; k < 4; ++k) out.of[k] = tiles.sees(tile, key + k) ? from[tiles.slot(tile) + key + k] : 0.0f;
  }
  return out;
}

KT_GPU void weigh_tile(const LatentTiles& tiles, int tile, const FourScales& scales, const LatentShared& shared,
                       LatentRow& all) {
  const int thread = gpu::thread_again(), head = thread / 4, q = thread % 4;
  float x[4] = {}, top = all.top;
  KT_UNROLL(4)
  for (int w = 0; w < kLatentWarps; ++w) {
    const gpu::Words share = gpu::load16(shared.scores + (w * kLatentHeads + head) * kScoreStride + q * 4);
    for (int k = 0; k < 4; ++k) x[k] += gpu::float_of(share.word[k]);
  }
  KT_UNROLL(4)
  for (int k = 0; k < 4; ++k) {
    x[k] = tiles.sees(tile, q * 4 + k) ? x[k] * scales.of[k] : kSawNothing;
    top = x[k] > top ? x[k] : top;
  }
  KT_UNROLL(2)
  for (int mask = 1; mask < 4; mask *= 2) {
    const float other = gpu::shuffle_xor(top, mask);
    top = other > top ? other : top;
  }
  const float base = top > kSawNothing ? top : 0.0f, old = gpu::exp2(all.top - base);
  all.top = top;
  all.sum *= old;
  KT_UNROLL(4)
  for (int k = 0; k < 4; ++k) {
    x[k] = gpu::exp2(x[k] - base);
    all.sum += x[k];
    x[k] *= scales.of[k];
  }
  if (q == 0) shared.old[head] = old;
  auto* const to = reinterpret_cast<uint32_t*>(shared.weights + head / 16 * gpu::kWarp + head % 8 * 4 + q % 2 * 2);
  const int word = q / 2 * 2 + head % 16 / 8;
  to[word] = gpu::bf16_pair(x[0], x[1]);
  to[4 + word] = gpu::bf16_pair(x[2], x[3]);
}

// own: [both][64 columns, of which a lane has 8][4].
constexpr int kOwnTiles = kOwnColumns / 8;
KT_GPU void add_tile(const CachePlane& plane, const gpu::Words* tile, const LatentShared& shared,
                     float (&own)[kBoth][kOwnTiles][4]) {
  const int thread = gpu::thread_again(), warp = thread / gpu::kWarp, lane = thread % gpu::kWarp,
            i = lane / 4, j = lane % 4;
  gpu::Words weights[kBoth];
  KT_UNROLL(2)
  for (int b = 0; b < kBoth; ++b) {
    weights[b] = shared.weights[b * gpu::kWarp + lane];
    const float old = shared.old[b * 16 + i], old8 = shared.old[b * 16 + i + 8];
    if (old == 1.0f && old8 == 1.0f) continue;
    KT_UNROLL(16)
    for (int t = 0; t < kOwnTiles; ++t)
      for (int e = 0; e < 4; ++e) own[b][t][e] *= e < 2 ? old : old8;
  }
  KT_UNROLL(2)
  for (int c = 0; c < kOwnColumns / 64; ++c) {
    if (warp * kOwnColumns + c * 64 >= plane.dv_pad) continue;
    gpu::Words values[4];
    KT_UNROLL(4)
    for (int k = 0; k < 4; ++k)
      values[k] = tile[key_word(j * 2 + k % 2 + k / 2 * 8, warp * (kOwnColumns / 8) + c * 8 + i)];
    KT_UNROLL(8)
    for (int t = 0; t < 8; ++t) {
      const gpu::Words2 pair = value_pairs<KvType::kBf16>(values, t);
      KT_UNROLL(2)
      for (int b = 0; b < kBoth; ++b) gpu::multiply_add(own[b][c * 8 + t], weights[b], pair);
    }
  }
}

// What was gathered, a lane's columns of its four heads. `tops` and `sums` are [heads].
KT_GPU void store_latent(const AttendMatrixArgs& args, const AttendPlace& place,
                         const float (&own)[kBoth][kOwnTiles][4], const float* tops, const float* sums) {
  const int thread = gpu::thread_again(), warp = thread / gpu::kWarp, i = thread % gpu::kWarp / 4, j = thread % 4;
  KT_UNROLL(4)
  for (int r = 0; r < 2 * kBoth; ++r) {
    const int head = r * 8 + i;
    if (head >= place.seen.heads) continue;
    KT_UNROLL(2)
    for (int c = 0; c < kOwnColumns / 64; ++c)
      for (int e = 0; e < 2; ++e)
        for (int t = 0; t < 8; t += 4) {
          const int column = warp * kOwnColumns + c * 64 + (2 * j + e) * 8 + t, at = c * 8 + t, which = r % 2 * 2 + e;
          store_four(args, place, place.seen.head + head, column, tops[head], sums[head],
                     {own[r / 2][at][which], own[r / 2][at + 1][which], own[r / 2][at + 2][which],
                      own[r / 2][at + 3][which]});
        }
  }
}

template <KvType kType>
KT_GPU void attend_latent(const AttendMatrixArgs& args, const LatentShared& shared) {
  const AttendPlace place = attend_place(args, kLatentHeads);
  if (!place.there) return store_nothing(args, place.seen);
  const Seen& seen = place.seen;
  const CachePlane& plane = args.rows.plane;
  const int from = place.first_page * kKvBlock, to = place.end * kKvBlock - 1;
  const LatentTiles tiles{args.rows, seen, args.rows.places.pages + args.rows.places.first_pages[seen.token],
                          (seen.oldest > from ? seen.oldest : from) / kLatentKeys,
                          (seen.position < to ? seen.position : to) / kLatentKeys + 1};
  copy_keys<kType>(tiles, tiles.first, shared);
  gpu::Words query[kBoth][kSteps];
  load_latent_queries(args.rows, seen, query);
  LatentRow all;
  float own[kBoth][kOwnTiles][4] = {};
  KT_UNROLL(1)
  for (int tile = tiles.first; tile < tiles.end; ++tile) {
    const FourScales scales = key_scales<kType>(tiles, tile);
    gpu::await_copies<0>();
    gpu::barrier();  // the tile is there, the one before is added
    if (tile + 1 < tiles.end) copy_keys<kType>(tiles, tile + 1, shared);
    const gpu::Words* const keys =
        shared.tiles + (kType == KvType::kBf16 ? tile % 2 * kLatentKeys * kKeyRow : 0);
    if constexpr (kType == KvType::kS8) {
      widen_keys(plane, tile, shared);
      gpu::barrier();
    }
    score_tile(plane, keys, query, shared.scores);
    gpu::barrier();
    weigh_tile(tiles, tile, scales, shared, all);
    gpu::barrier();
    add_tile(plane, keys, shared, own);
  }
  float sum = all.sum;
  sum += gpu::shuffle_xor(sum, 1);
  sum += gpu::shuffle_xor(sum, 2);
  float* const tops = shared.scores;
  float* const sums = shared.scores + kLatentHeads;
  if (gpu::thread() % 4 == 0) {
    tops[gpu::thread() / 4] = all.top;
    sums[gpu::thread() / 4] = sum;
  }
  gpu::barrier();
  store_latent(args, attend_place(args, kLatentHeads), own, tops, sums);  // found again rather than kept
}

// Blocks [heads, tokens * groups].
#define KT_ATTEND_LATENT(name, type)                                                               \
  KT_KERNEL_BESIDE(name, AttendMatrixArgs, args, kLatentWarps* gpu::kWarp, 2) {                    \
    KT_SHARED(gpu::Words, tiles, 2 * kLatentKeys * kKeyRow);                                       \
    KT_SHARED(float, scores, kLatentWarps * kLatentHeads * kScoreStride);                          \
    KT_SHARED(gpu::Words, weights, kBoth * gpu::kWarp);                                            \
    KT_SHARED(float, old, kLatentHeads);                                                           \
    attend_latent<type>(args, {tiles, tiles + kLatentKeys * kKeyRow, scores, weights, old});       \
  }
KT_ATTEND_LATENT(kt_attend_latent_bf16, KvType::kBf16)
KT_ATTEND_LATENT(kt_attend_latent_int8, KvType::kS8)

}  // namespace kt::inline cuda
