// Attention of many tokens of one sequence on matrix units (attend.h). A block of four warps takes 64 rows,
// neighbouring tokens times the heads that share keys, and goes over the pages that they see: keys and values of a page
// stand in the block's memory, each copied while the other is multiplied. A warp has 16 rows to itself.
#include "cuda/kernels/attend.h"

namespace kt::inline cuda {

constexpr int kManyWarps = kAttendManyRows / 16;
constexpr int kPageTiles = kKvBlock / 8, kManyTiles = kFewColumns / 8;

template <KvType kKind>
struct ManyForm {
  static constexpr KvType kType = kKind;
  static constexpr int kLane = kRun<kKind>;  // columns of a lane's Words
  static constexpr int kKeyWords = kFewColumns / (4 * kLane),
                       kValueWords = kFewColumns / (8 * kLane);  // of a lane and a key
  static constexpr int kRow = kFewColumns / kLane;                                                   // Words of a key
};

// As attention_latent.cu: neighbouring keys, and every second key, in different banks.
template <typename F>
KT_GPU int page_word(int key, int word) {
  return key * F::kRow + (word ^ ((key & 6) ^ (key & 1) << 2));
}

// The rows of a block: tokens [first, end), the heads of one head of keys of each.
struct ManyTokens {
  int first, end, kv_head, sharing;
  int oldest, newest;  // keys that any of them sees

  KT_GPU int token(int row) const { return row < (kAttendManyRows / sharing) * sharing ? first + row / sharing : end; }
  KT_GPU int head(int row) const { return kv_head * sharing + row % sharing; }
};
// Tokens that see most begin first.
KT_GPU ManyTokens many_tokens(const AttendMatrixArgs& args, int number, int tiles) {
  const AttendRowsArgs& rows = args.rows;
  const int sharing = rows.heads / rows.plane.heads, tokens = kAttendManyRows / sharing, last = args.first + args.count;
  ManyTokens out{args.first + (tiles - 1 - number) * tokens, 0, gpu::block(), sharing, 0, 0};
  out.end = out.first + tokens < last ? out.first + tokens : last;
  out.newest = rows.places.positions[out.end - 1];
  const int oldest = rows.places.positions[out.first] - rows.window + 1;
  out.oldest = rows.window > 0 && oldest > 0 ? oldest : 0;
  return out;
}

// A page's keys or values of one head on their way to memory; zeros for those that no row sees.
template <typename F>
KT_GPU void copy_page(const uint8_t* block, int columns, const SeenKeys& sees, gpu::Words* to) {
  constexpr int kAtOnce = F::kRow, kKeysAtOnce = kManyWarps * gpu::kWarp / kAtOnce;  // threads of a key
  const int thread = gpu::thread_again(), word = thread % kAtOnce;
  if (word * F::kLane < columns) {
    KT_UNROLL(4)
    for (int key = thread / kAtOnce; key < kKvBlock; key += kKeysAtOnce) {
      gpu::Words* const at = to + page_word<F>(key, word);
      if (key >= sees.least && key <= sees.most)
        gpu::copy16(at, block + key * columns * kv_bytes(F::kType) + word * sizeof(gpu::Words));
      else
        gpu::store16(at, {});
    }
  }
  gpu::end_copies();
}

template <typename F>
KT_GPU void score_page(const gpu::Words* keys, const gpu::Words (&query)[kFewColumns / 16], int columns,
                       float (&scores)[kPageTiles][4]) {
  const int lane = gpu::thread_again() % gpu::kWarp;
  KT_UNROLL(8)
  for (int n = 0; n < kPageTiles; ++n) {
    KT_UNROLL(4)
    for (int e = 0; e < 4; ++e) scores[n][e] = 0;
  }
  KT_UNROLL(4)
  for (int c = 0; c < F::kKeyWords; ++c) {
    if (c * 4 * F::kLane >= columns) continue;
    KT_UNROLL(8)
    for (int n = 0; n < kPageTiles; ++n) {
      const gpu::Words key = keys[page_word<F>(n * 8 + lane / 4, c * 4 + lane % 4)];
      KT_UNROLL(4)
      for (int m = 0; m < F::kLane / 4; ++m)
        gpu::multiply_add(scores[n], query[c * (F::kLane / 4) + m], key_pairs<F::kType>(key, m));
    }
  }
}

// Scores or weights times the scales of their keys, which stand behind a block's numbers.
template <typename F>
KT_GPU void scale_page(const uint8_t* block, int columns, const SeenKeys& sees, float (&scores)[kPageTiles][4]) {
  if constexpr (F::kType == KvType::kS8) {
    const auto* const scales = reinterpret_cast<const float*>(block + kKvBlock * columns);
    KT_UNROLL(8)
    for (int n = 0; n < kPageTiles; ++n) {
      KT_UNROLL(4)
      for (int e = 0; e < 4; ++e) {
        const int key = n * 8 + gpu::thread() % 4 * 2 + e % 2;
        scores[n][e] *= key >= sees.least && key <= sees.most ? scales[key] : 0.0f;
      }
    }
  }
}

template <typename F>
KT_GPU void add_page(const gpu::Words* values, const float (&p)[kPageTiles][4], int columns,
                     float (&own)[kManyTiles][4]) {
  const int lane = gpu::thread_again() % gpu::kWarp;
  KT_UNROLL(4)
  for (int step = 0; step < kKvBlock / 16; ++step) {
    const int n = step * 2;
    const gpu::Words a{{gpu::bf16_pair(p[n][0], p[n][1]), gpu::bf16_pair(p[n][2], p[n][3]),
                        gpu::bf16_pair(p[n + 1][0], p[n + 1][1]), gpu::bf16_pair(p[n + 1][2], p[n + 1][3])}};
    KT_UNROLL(2)
    for (int c = 0; c < F::kValueWords; ++c) {
      if (c * 8 * F::kLane >= columns) continue;
      gpu::Words of[4];
      KT_UNROLL(4)
      for (int k = 0; k < 4; ++k)
        of[k] = values[page_word<F>(step * 16 + lane % 4 * 2 + k % 2 + k / 2 * 8, c * 8 + lane / 4)];
      KT_UNROLL(16)
      for (int t = 0; t < F::kLane; ++t)
        gpu::multiply_add(own[c * F::kLane + t], a, value_pairs<F::kType>(of, t));
    }
  }
}

// What rows i and i + 8 of a warp get.
template <typename F>
KT_GPU void store_rows(const AttendMatrixArgs& args, const ManyTokens& place,
                       const float (&own)[kManyTiles][4], Running& all) {
  const AttendRowsArgs& rows = args.rows;
  const int thread = gpu::thread_again(), lane = thread % gpu::kWarp, j = lane % 4;
  KT_UNROLL(2)
  for (int r = 0; r < 2; ++r) {
    float sum = all.sum[r];
    sum += gpu::shuffle_xor(sum, 1);
    sum += gpu::shuffle_xor(sum, 2);
    const int row = thread / gpu::kWarp * 16 + lane / 4 + r * 8, token = place.token(row), head = place.head(row);
    if (token >= place.end) continue;
    const RowShare share = share_of(rows, head, all.top[r], sum);
    const float inverse = share.factor / share.sum;
    float* const out = rows.out + token * rows.out_width + head * rows.plane.dv;
    KT_UNROLL(2)
    for (int c = 0; c < F::kValueWords; ++c)
      for (int e = 0; e < 2; ++e)
        for (int t = 0; t < F::kLane; ++t) {
          const int column = (c * 8 + 2 * j + e) * F::kLane + t;
          if (column < rows.plane.dv) out[column] = own[c * F::kLane + t][r * 2 + e] * inverse;
        }
  }
}

// The warp's rows of queries.
template <typename F>
KT_GPU void load_many_queries(const AttendRowsArgs& args, const ManyTokens& place,
                              gpu::Words (&query)[kFewColumns / 16], SeenKeys (&sees)[2]) {
  const int lane = gpu::thread() % gpu::kWarp, first = gpu::thread() / gpu::kWarp * 16 + lane / 4, d = args.plane.d;
  const float* row[2];
  KT_UNROLL(2)
  for (int r = 0; r < 2; ++r) {
    const int token = place.token(first + r * 8);
    row[r] = nullptr;
    sees[r] = {0, -1};
    if (token >= place.end) continue;
    row[r] = args.q + token * args.q_width + place.head(first + r * 8) * d;
    const int position = args.places.positions[token], oldest = position - args.window + 1;
    sees[r] = {args.window > 0 && oldest > 0 ? oldest : 0, position};
  }
  KT_UNROLL(8)
  for (int at = 0; at < kFewColumns / 16; ++at) {
    constexpr int kFours = F::kLane / 4;
    const int column = (at / kFours * 4 + lane % 4) * F::kLane + at % kFours * 4;
    query[at] = query_operand(row[0], row[1], column, d, args.scale * kLog2E);
  }
}

template <typename F>
KT_GPU void attend_many(const AttendMatrixArgs& args, gpu::Words* keys, gpu::Words* values) {
  const AttendRowsArgs& rows = args.rows;
  const CachePlane& plane = rows.plane;
  const ManyTokens place = many_tokens(args, gpu::block_y(), args.tiles);
  const int32_t* const numbers = rows.places.pages + rows.places.first_pages[place.first];
  const uint8_t* const memory = plane.memory + place.kv_head * plane.key_bytes;
  const int64_t to_values =
      plane.heads * plane.key_bytes + place.kv_head * (plane.value_bytes - plane.key_bytes);
  const int end = place.newest / kKvBlock + 1;
  int page = place.oldest / kKvBlock;
  const auto seen_of = [&](int number) {
    return SeenKeys{place.oldest - number * kKvBlock, place.newest - number * kKvBlock};
  };
  const uint8_t* block = memory + numbers[page] * plane.page_bytes;
  copy_page<F>(block, plane.d_pad, seen_of(page), keys);
  gpu::Words query[kFewColumns / 16];
  SeenKeys sees[2];
  load_many_queries<F>(rows, place, query, sees);
  Running all;
  float own[kManyTiles][4] = {};
  KT_UNROLL(1)
  for (; page < end; ++page) {
    const int first = page * kKvBlock;
    gpu::await_copies<0>();
    gpu::barrier();  // keys are there, values of the page before are added
    copy_page<F>(block + to_values, plane.dv_pad, seen_of(page), values);
    float scores[kPageTiles][4], old[2];
    score_page<F>(keys, query, plane.d_pad, scores);
    scale_page<F>(block, plane.d_pad, seen_of(page), scores);
    gpu::await_copies<0>();
    gpu::barrier();  // values are there, keys are multiplied
    const uint8_t* const here = block + to_values;
    if (page + 1 < end) {
      block = memory + numbers[page + 1] * plane.page_bytes;
      copy_page<F>(block, plane.d_pad, seen_of(page + 1), keys);
    }
    weigh(scores,
          {{sees[0].least - first, sees[0].most - first}, {sees[1].least - first, sees[1].most - first}}, all,
          old);
    if (old[0] != 1.0f || old[1] != 1.0f) {
      KT_UNROLL(16)
      for (int t = 0; t < kManyTiles; ++t)
        for (int e = 0; e < 4; ++e) own[t][e] *= old[e / 2];
    }
    scale_page<F>(here, plane.dv_pad, seen_of(page), scores);
    add_page<F>(values, scores, plane.dv_pad, own);
  }
  store_rows<F>(args, many_tokens(args, gpu::block_y(), args.tiles), own, all);
}

// Blocks [heads of keys, tiles of tokens].
#define KT_ATTEND_MANY(name, type)                                                 \
  KT_KERNEL_BESIDE(name, AttendMatrixArgs, args, kManyWarps* gpu::kWarp, 2) {      \
    KT_SHARED(gpu::Words, keys, kKvBlock * ManyForm<type>::kRow);                  \
    KT_SHARED(gpu::Words, values, kKvBlock * ManyForm<type>::kRow);                \
    attend_many<ManyForm<type>>(args, keys, values);                               \
  }
KT_ATTEND_MANY(kt_attend_many_bf16, KvType::kBf16)
KT_ATTEND_MANY(kt_attend_many_int8, KvType::kS8)

}  // namespace kt::inline cuda
