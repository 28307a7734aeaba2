// Attention of one or a few tokens, each over pages of its own, on matrix units (attend.h): heads that share keys are
// the rows of an operand. A block takes a group of pages; each of its four warps has 16 keys of every page to itself,
// straight from device memory to registers, so that nothing is read twice and nobody waits for another before the end.
// While a warp multiplies, its next keys and values are under way.
#include "cuda/kernels/attend.h"

namespace kt::inline cuda {

constexpr int kFewWarps = 4, kTileKeys = kKvBlock / kFewWarps;
constexpr int kJoinColumns = 128, kJoinStride = kJoinColumns + 4;  // of what warps gathered, at once

// Keys and values of at most so many columns, of which kPart are in registers at once; where that is all, they are
// loaded a page ahead.
constexpr int kPart = 128;
template <KvType kKind, int kColumns>
struct FewForm {
  static constexpr KvType kType = kKind;
  static constexpr int kMost = kColumns, kLane = kRun<kKind>;  // columns of a lane's Words
  static constexpr int kKeyWords = kPart / (4 * kLane), kValueWords = kPart / (8 * kLane);  // of a lane and a key
  static constexpr int kTiles = kColumns / 8;
  static constexpr bool kAhead = kColumns == kPart;
};

// A warp's keys of a page as they are stored: two groups of 8, of each a key for four lanes; scales of keys 2 j, 2 j +
// 1, 8 further.
template <typename F>
struct FewKeys {
  gpu::Words of[2][F::kKeyWords];
  float scales[4];
};
// Values of keys 2 j, 2 j + 1, 2 j + 8, 2 j + 9.
template <typename F>
struct FewValues {
  gpu::Words of[F::kValueWords][4];
  float scales[4];
};

// Where the pages of a block's row and head lie, and which keys of a page are seen.
struct FewPages {
  const AttendRowsArgs& args;
  const Seen& seen;
  const int32_t* numbers;
  int kv_head, first_key;  // of the warp in a page

  KT_GPU const uint8_t* keys(int number) const {
    return args.plane.memory + number * args.plane.page_bytes + kv_head * args.plane.key_bytes;
  }
  KT_GPU const uint8_t* values(int number) const {
    const CachePlane& plane = args.plane;
    return plane.memory + number * plane.page_bytes + plane.heads * plane.key_bytes + kv_head * plane.value_bytes;
  }
  // Of the warp's tile in that page of the row.
  KT_GPU SeenKeys seen_of(int page) const { return seen_of_page(seen, page * kKvBlock + first_key); }
};
KT_GPU int tile_key(int k) { return gpu::thread() % 4 * 2 + k % 2 + k / 2 * 8; }

template <typename F>
KT_GPU void load_scales(const uint8_t* block, int columns, int first_key, const SeenKeys& sees, float (&scales)[4]) {
  if constexpr (F::kType == KvType::kS8) {
    const auto* const from = reinterpret_cast<const float*>(block + kKvBlock * columns) + first_key;
    KT_UNROLL(4)
    for (int k = 0; k < 4; ++k) {
      const int key = tile_key(k);
      scales[k] = key >= sees.least && key <= sees.most ? from[key] : 0.0f;
    }
  }
}

// Keys that are not seen may hold anything: zeros in their place.
template <typename F, int kFirst = 0>
KT_GPU void load_keys(const FewPages& pages, int page, int number, FewKeys<F>& to) {
  const CachePlane& plane = pages.args.plane;
  const int lane = gpu::thread() % gpu::kWarp;
  const SeenKeys sees = pages.seen_of(page);
  const uint8_t* const block = pages.keys(number);
  KT_UNROLL(2)
  for (int n = 0; n < 2; ++n) {
    const int key = n * 8 + lane / 4;
    const uint8_t* const row =
        block + ((pages.first_key + key) * plane.d_pad + kFirst) * kv_bytes(F::kType) + lane % 4 * sizeof(gpu::Words);
    const bool there = key >= sees.least && key <= sees.most;
    KT_UNROLL(8)
    for (int c = 0; c < F::kKeyWords; ++c) {
      const int column = kFirst + (c * 4 + lane % 4) * F::kLane;
      to.of[n][c] = there && column < plane.d_pad ? gpu::load16(row + c * 4 * sizeof(gpu::Words)) : gpu::Words{};
    }
  }
  load_scales<F>(block, plane.d_pad, pages.first_key, sees, to.scales);
}

template <typename F, int kFirst = 0>
KT_GPU void load_values(const FewPages& pages, int page, int number, FewValues<F>& to) {
  const CachePlane& plane = pages.args.plane;
  const int i = gpu::thread() % gpu::kWarp / 4;
  const SeenKeys sees = pages.seen_of(page);
  const uint8_t* const block = pages.values(number);
  KT_UNROLL(4)
  for (int k = 0; k < 4; ++k) {
    const int key = tile_key(k);
    const uint8_t* const row =
        block + ((pages.first_key + key) * plane.dv_pad + kFirst) * kv_bytes(F::kType) + i * sizeof(gpu::Words);
    const bool there = key >= sees.least && key <= sees.most;
    KT_UNROLL(4)
    for (int c = 0; c < F::kValueWords; ++c) {
      const int column = kFirst + (c * 8 + i) * F::kLane;
      to.of[c][k] = there && column < plane.dv_pad ? gpu::load16(row + c * 8 * sizeof(gpu::Words)) : gpu::Words{};
    }
  }
  load_scales<F>(block, plane.dv_pad, pages.first_key, sees, to.scales);
}

template <typename F, int kFirst = 0>
KT_GPU void score_keys(const gpu::Words* query, const FewKeys<F>& keys, int columns, float (&scores)[2][4]) {
  const int lane = gpu::thread() % gpu::kWarp;
  KT_UNROLL(8)
  for (int c = 0; c < F::kKeyWords; ++c) {
    if (kFirst + c * 4 * F::kLane >= columns) continue;
    KT_UNROLL(4)
    for (int m = 0; m < F::kLane / 4; ++m) {
      const gpu::Words a = query[(kFirst / 16 + c * (F::kLane / 4) + m) * gpu::kWarp + lane];
      KT_UNROLL(2)
      for (int n = 0; n < 2; ++n) gpu::multiply_add(scores[n], a, key_pairs<F::kType>(keys.of[n][c], m));
    }
  }
  if constexpr (F::kType == KvType::kS8 && kFirst + kPart == F::kMost) {
    KT_UNROLL(2)
    for (int n = 0; n < 2; ++n)
      for (int e = 0; e < 4; ++e) scores[n][e] *= keys.scales[n * 2 + e % 2];
  }
}

// The tiles of own are [Words of a lane][its columns].
template <typename F, int kFirst = 0>
KT_GPU void add_values(const float (&weights)[2][4], const FewValues<F>& values, int columns,
                       float (&own)[F::kTiles][4]) {
  float p[2][4];
  KT_UNROLL(2)
  for (int n = 0; n < 2; ++n)
    for (int e = 0; e < 4; ++e) {
      p[n][e] = weights[n][e];
      if constexpr (F::kType == KvType::kS8) p[n][e] *= values.scales[n * 2 + e % 2];
    }
  const gpu::Words a{{gpu::bf16_pair(p[0][0], p[0][1]), gpu::bf16_pair(p[0][2], p[0][3]),
                      gpu::bf16_pair(p[1][0], p[1][1]), gpu::bf16_pair(p[1][2], p[1][3])}};
  KT_UNROLL(4)
  for (int c = 0; c < F::kValueWords; ++c) {
    if (kFirst + c * 8 * F::kLane >= columns) continue;
    KT_UNROLL(16)
    for (int t = 0; t < F::kLane; ++t)
      gpu::multiply_add(own[kFirst / 8 + c * F::kLane + t], a, value_pairs<F::kType>(values.of[c], t));
  }
}

template <typename F>
KT_GPU void grow_old(const float (&old)[2], float (&own)[F::kTiles][4]) {
  if (old[0] == 1.0f && old[1] == 1.0f) return;
  KT_UNROLL(32)
  for (int t = 0; t < F::kTiles; ++t)
    for (int e = 0; e < 4; ++e) own[t][e] *= old[e / 2];
}

// Rows of queries to operands, [Words of keys][four of a lane's columns][lane].
template <typename F>
KT_GPU void load_few_queries(const AttendRowsArgs& args, const Seen& seen, gpu::Words* query) {
  const int d = args.plane.d, lane = gpu::thread() % gpu::kWarp, i = lane / 4;
  const float* const first = args.q + seen.token * args.q_width + seen.head * d;
  const float* const row = i < seen.heads ? first + i * d : nullptr;
  const float* const row8 = i + 8 < seen.heads ? first + (i + 8) * d : nullptr;
  constexpr int kFours = F::kLane / 4, kChunk = 4 * F::kLane;
  const int operands = (args.plane.d_pad + kChunk - 1) / kChunk * kFours;
  KT_UNROLL(1)
  for (int at = gpu::thread() / gpu::kWarp; at < operands; at += kFewWarps) {
    const int column = (at / kFours * 4 + lane % 4) * F::kLane + at % kFours * 4;
    query[at * gpu::kWarp + lane] = query_operand(row, row8, column, d, args.scale * kLog2E);
  }
}

// What the four warps gathered, in their order, a few columns of it at a time; then where it belongs.
template <typename F, int kFirst>
KT_GPU void join_warps(const AttendMatrixArgs& args, const AttendPlace& place,
                       const float (&own)[F::kTiles][4], float* memory, const float* tops,
                       const float* sums) {
  const int warp = gpu::thread() / gpu::kWarp, lane = gpu::thread() % gpu::kWarp, i = lane / 4, j = lane % 4;
  constexpr int kWords = kJoinColumns / (8 * F::kLane);
  gpu::barrier();
  KT_UNROLL(4)
  for (int c = 0; c < kWords; ++c) {
    KT_UNROLL(4)
    for (int e = 0; e < 4; ++e) {
      float* const to =
          memory + (warp * 16 + i + e / 2 * 8) * kJoinStride + (c * 8 + 2 * j + e % 2) * F::kLane;
      KT_UNROLL(4)
      for (int t = 0; t < F::kLane; t += 4) {
        constexpr int kTile = kFirst * kWords * F::kLane;
        const int at = kTile + c * F::kLane + t;
        gpu::store16(to + t, {{gpu::bits_of(own[at][e]), gpu::bits_of(own[at + 1][e]), gpu::bits_of(own[at + 2][e]),
                               gpu::bits_of(own[at + 3][e])}});
      }
    }
  }
  gpu::barrier();
  for (int row = warp; row < place.seen.heads; row += kFewWarps) {
    float top = kSawNothing, sum = 0, x[4] = {};
    KT_UNROLL(4)
    for (int w = 0; w < kFewWarps; ++w) top = tops[w * 16 + row] > top ? tops[w * 16 + row] : top;
    KT_UNROLL(4)
    for (int w = 0; w < kFewWarps; ++w) {
      const float factor = gpu::exp2(tops[w * 16 + row] - top);
      sum = gpu::fma(sums[w * 16 + row], factor, sum);
      const gpu::Words words = gpu::load16(memory + (w * 16 + row) * kJoinStride + lane * 4);
      for (int n = 0; n < 4; ++n) x[n] = gpu::fma(gpu::float_of(words.word[n]), factor, x[n]);
    }
    store_four(args, place, place.seen.head + row, kFirst * kJoinColumns + lane * 4, top, sum, x);
  }
}

template <typename F>
KT_GPU void attend_few(const AttendMatrixArgs& args, gpu::Words* query, float* memory, float* tops, float* sums) {
  const AttendPlace place = attend_place(args, kFewHeads);
  if (!place.there) return store_nothing(args, place.seen);
  const CachePlane& plane = args.rows.plane;
  const int warp = gpu::thread() / gpu::kWarp, lane = gpu::thread() % gpu::kWarp;
  const FewPages pages{args.rows, place.seen, args.rows.places.pages + args.rows.places.first_pages[place.seen.token],
                       place.seen.head / (args.rows.heads / plane.heads), warp * kTileKeys};
  FewKeys<F> keys;
  FewValues<F> values;
  int page = place.first_page, number = pages.numbers[page];
  if constexpr (F::kAhead) {
    load_keys<F>(pages, page, number, keys);
    load_values<F>(pages, page, number, values);
  }
  load_few_queries<F>(args.rows, place.seen, query);
  gpu::barrier();
  Running all;
  float own[F::kTiles][4] = {};
  KT_UNROLL(1)
  for (; page < place.end; ++page) {
    float scores[2][4] = {}, old[2];
    const bool more = page + 1 < place.end;
    const int next = more ? pages.numbers[page + 1] : number;
    const SeenKeys sees = pages.seen_of(page);
    if constexpr (F::kAhead) {
      score_keys<F>(query, keys, plane.d_pad, scores);
      if (more) load_keys<F>(pages, page + 1, next, keys);
      weigh(scores, {sees, sees}, all, old);
      grow_old<F>(old, own);
      add_values<F>(scores, values, plane.dv_pad, own);
      if (more) load_values<F>(pages, page + 1, next, values);
    } else {
      load_keys<F>(pages, page, number, keys);
      score_keys<F>(query, keys, plane.d_pad, scores);
      load_keys<F, kPart>(pages, page, number, keys);
      score_keys<F, kPart>(query, keys, plane.d_pad, scores);
      load_values<F>(pages, page, number, values);
      weigh(scores, {sees, sees}, all, old);
      grow_old<F>(old, own);
      add_values<F>(scores, values, plane.dv_pad, own);
      load_values<F, kPart>(pages, page, number, values);
      add_values<F, kPart>(scores, values, plane.dv_pad, own);
    }
    number = next;
  }
  KT_UNROLL(2)
  for (int r = 0; r < 2; ++r) {
    float sum = all.sum[r];
    sum += gpu::shuffle_xor(sum, 1);
    sum += gpu::shuffle_xor(sum, 2);
    if (lane % 4 == 0) {
      tops[warp * 16 + lane / 4 + r * 8] = all.top[r];
      sums[warp * 16 + lane / 4 + r * 8] = sum;
    }
  }
  join_warps<F, 0>(args, place, own, memory, tops, sums);
  if constexpr (F::kMost > kJoinColumns)
    if (plane.dv_pad > kJoinColumns) join_warps<F, 1>(args, place, own, memory, tops, sums);
}

// Blocks [heads that share keys, tokens * groups].
#define KT_ATTEND_FEW(name, type, columns, beside)                                      \
  KT_KERNEL_BESIDE(name, AttendMatrixArgs, args, kFewWarps* gpu::kWarp, beside) {       \
    KT_SHARED(gpu::Words, query, (columns) / 16 * gpu::kWarp);                          \
    KT_SHARED(float, memory, kFewWarps * 16 * kJoinStride);                             \
    KT_SHARED(float, tops, kFewWarps * 16);                                             \
    KT_SHARED(float, sums, kFewWarps * 16);                                             \
    attend_few<FewForm<type, columns>>(args, query, memory, tops, sums);                \
  }
KT_ATTEND_FEW(kt_attend_few_bf16, KvType::kBf16, kFewColumns, 2)
KT_ATTEND_FEW(kt_attend_few_int8, KvType::kS8, kFewColumns, 3)
KT_ATTEND_FEW(kt_attend_few_wide_bf16, KvType::kBf16, kFewWideColumns, 2)
KT_ATTEND_FEW(kt_attend_few_wide_int8, KvType::kS8, kFewWideColumns, 2)

// Blocks [heads * parts of kAttendSumColumns columns, tokens]: what the groups gave. Warps take every eighth group, all
// of them under way at once, and are added up in their order.
constexpr int kSumWarps = kAttendSumThreads / gpu::kWarp, kOfSumWarp = kAttendGroups / kSumWarps;

KT_KERNEL(kt_attend_sum, AttendMatrixArgs, args, kAttendSumThreads) {
  KT_SHARED(float, partial, kSumWarps);
  KT_SHARED(float, factors, kAttendGroups);
  KT_SHARED(float, sums, kSumWarps * kAttendSumColumns);
  const AttendRowsArgs& rows = args.rows;
  const int slices = (rows.plane.dv_pad + kAttendSumColumns - 1) / kAttendSumColumns;
  const int token = args.first + gpu::block_y(), head = gpu::block() / slices;
  const int thread = gpu::thread(), warp = thread / gpu::kWarp, lane = thread % gpu::kWarp;
  const int begin = gpu::block() % slices * kAttendSumColumns, column = begin + lane * 4;
  const bool there = live(rows.places, token);
  const int groups = there ? seen_by(rows, token, head, 1).groups() : 0;
  gpu::Words parts[kOfSumWarp];
  KT_UNROLL(8)
  for (int n = 0; n < kOfSumWarp; ++n) {
    const int group = warp + n * kSumWarps;
    parts[n] = group < groups && column < rows.plane.dv_pad
                   ? gpu::load16(rows.parts + part_at(args, token, head, group) * rows.plane.dv_pad + column)
                   : gpu::Words{};
  }
  const float* const stats = args.stats + part_at(args, token, head, thread) * 2;
  const float mine = thread < groups ? stats[0] : kSawNothing, weight = thread < groups ? stats[1] : 0.0f;
  float top = gpu::block_max(mine, partial);
  const float sink = rows.sinks ? rows.sinks[head] * kLog2E : kSawNothing;
  if (sink > top) top = sink;
  const float factor = thread < groups ? gpu::exp2(mine - top) : 0.0f;
  if (thread < kAttendGroups) factors[thread] = factor;
  gpu::barrier();
  float sum = gpu::block_sum(factor * weight, partial);
  if (rows.sinks) sum += gpu::exp2(sink - top);
  float x[4] = {};
  KT_UNROLL(8)
  for (int n = 0; n < kOfSumWarp; ++n)
    for (int i = 0; i < 4; ++i)
      x[i] = gpu::fma(gpu::float_of(parts[n].word[i]), factors[warp + n * kSumWarps], x[i]);
  gpu::store16(sums + warp * kAttendSumColumns + lane * 4,
               {{gpu::bits_of(x[0]), gpu::bits_of(x[1]), gpu::bits_of(x[2]), gpu::bits_of(x[3])}});
  gpu::barrier();
  if (thread >= kAttendSumColumns || begin + thread >= rows.plane.dv) return;
  float all = 0;
  for (int w = 0; w < kSumWarps; ++w) all += sums[w * kAttendSumColumns + thread];
  rows.out[token * rows.out_width + head * rows.plane.dv + begin + thread] = there ? all / sum : 0.0f;
}

}  // namespace kt::inline cuda
