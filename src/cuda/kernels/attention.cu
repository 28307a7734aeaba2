// Softmax over the pages that a row sees.
#include "cuda/kernels/seen.h"

namespace kt::inline cuda {

// Four numbers of a row of a block, as they are stored: loads of many stand before the first use.
template <KvType kType>
struct StoredFour {
  uint32_t word[kv_bytes(kType)];
};
template <KvType kType>
KT_GPU StoredFour<kType> stored_four(const uint8_t* row, int column) {
  if constexpr (kType == KvType::kF32) {
    const gpu::Words words = gpu::load16(row + column * 4);
    return {{words.word[0], words.word[1], words.word[2], words.word[3]}};
  } else if constexpr (kType == KvType::kBf16) {
    const gpu::Words2 words = gpu::load8(row + column * 2);
    return {{words.word[0], words.word[1]}};
  } else {
    return {{*reinterpret_cast<const uint32_t*>(row + column)}};
  }
}
// Without the row's scale.
template <KvType kType>
KT_GPU float number_of(const StoredFour<kType>& four, int i) {
  if constexpr (kType == KvType::kF32) return gpu::float_of(four.word[i]);
  if constexpr (kType == KvType::kBf16)
    return gpu::float_of(i % 2 == 0 ? four.word[i / 2] << 16 : four.word[i / 2] & 0xFFFF0000u);
  return static_cast<float>(static_cast<int8_t>(four.word[0] >> 8 * i));
}
template <KvType kType>
KT_GPU float scale_of(const uint8_t* block, int padded, int slot) {
  return kType == KvType::kS8 ? reinterpret_cast<const float*>(block + kKvBlock * padded)[slot] : 1.0f;
}

// A block of 4 warps takes some heads of queries that read the same keys, and a page at a time: 8 lanes for each key,
// then 4 columns of the values for each lane, a quarter of the keys for each warp.
constexpr int kWarps = kAttendThreads / gpu::kWarp, kKeyLanes = 8;
constexpr int kOfWarp = kKvBlock / kWarps;           // keys of a page

// What fits a thread's registers: so many heads, and of their values the columns of its number and every 128th behind
// it.
template <KvType kKind, int kNumber, int kColumns>
struct Form {
  static constexpr KvType kType = kKind;
  static constexpr int kHeads = kNumber, kOwn = kColumns;
};

// Softmax over some keys, not divided yet: exp(score - top) summed, and of values times that.
template <typename F>
struct Gathered {
  float top[F::kHeads], sum[F::kHeads], own[F::kHeads][F::kOwn];
};

// Memory that the threads of such a block share.
struct AttendShared {
  float* query;    // [heads, d_pad]
  float* weights;  // [kKvBlock, heads]
  float* tops;     // [heads], of a page
  float* sums;
  float* values;  // [kWarps, heads, 128]
};

KT_GPU void load_queries(const AttendRowsArgs& args, const Seen& seen, int heads, float* query) {
  const CachePlane& plane = args.plane;
  for (int i = gpu::thread(); i < heads * plane.d_pad; i += gpu::threads()) {
    const int head = i / plane.d_pad, column = i % plane.d_pad;
    const bool there = head < seen.heads && column < plane.d;
    query[i] = there ? args.q[seen.token * args.q_width + (seen.head + head) * plane.d + column] * args.scale : 0.0f;
  }
  gpu::barrier();
}

// Scores of a page's keys, [kKvBlock, heads]; those that are not seen get the least. 8 lanes take 4 columns each of a
// key, and all keys of the warp at once.
template <typename F>
KT_GPU void score_page(const CachePlane& plane, const Seen& seen, const uint8_t* keys, int first,
                       const AttendShared& shared) {
  constexpr int kStep = kKeyLanes * 4, kAhead = 4, kTurn = gpu::kWarp / kKeyLanes, kTurns = kOfWarp / kTurn;
  const int warp = gpu::thread() / gpu::kWarp, lane = gpu::thread() % gpu::kWarp, part = lane % kKeyLanes;
  const int key = warp * kOfWarp + lane / kKeyLanes;  // and every fourth behind it
  const int least = seen.oldest - first, most = seen.position - first;
  float sums[kTurns][F::kHeads] = {};
  for (int begin = part * 4; begin < plane.d_pad; begin += kAhead * kStep) {
    StoredFour<F::kType> stored[kTurns][kAhead];
    KT_UNROLL(4)
    for (int t = 0; t < kTurns; ++t) {
      const uint8_t* const row = keys + int64_t{key + t * kTurn} * plane.d_pad * kv_bytes(F::kType);
      const bool sees = key + t * kTurn >= least && key + t * kTurn <= most;
      KT_UNROLL(4)
      for (int i = 0; i < kAhead; ++i) {
        const int column = begin + i * kStep;
        stored[t][i] = sees && column < plane.d_pad ? stored_four<F::kType>(row, column) : StoredFour<F::kType>{};
      }
    }
    KT_UNROLL(4)
    for (int i = 0; i < kAhead; ++i) {
      const int column = begin + i * kStep;
      KT_UNROLL(8)
      for (int h = 0; h < F::kHeads && column < plane.d_pad; ++h) {
        const gpu::Words q = gpu::load16(shared.query + h * plane.d_pad + column);
        KT_UNROLL(4)
        for (int t = 0; t < kTurns; ++t)
          for (int j = 0; j < 4; ++j)
            sums[t][h] = gpu::fma(gpu::float_of(q.word[j]), number_of<F::kType>(stored[t][i], j), sums[t][h]);
      }
    }
  }
  KT_UNROLL(4)
  for (int t = 0; t < kTurns; ++t) {
    const int mine = key + t * kTurn;
    const bool sees = mine >= least && mine <= most;
    const float scale = sees ? scale_of<F::kType>(keys, plane.d_pad, mine) : 1.0f;
    KT_UNROLL(8)
    for (int h = 0; h < F::kHeads; ++h) {
      float sum = sums[t][h];
      for (int mask = kKeyLanes / 2; mask > 0; mask /= 2) sum += gpu::shuffle_xor(sum, mask);
      if (part == 0) shared.weights[mine * F::kHeads + h] = sees ? sum * scale : kSawNothing;
    }
  }
  gpu::barrier();
}

// Scores become weights; each head's largest score and sum of weights. A warp takes every fourth head.
template <typename F>
KT_GPU void weigh_page(const uint8_t* values, int value_stride, const AttendShared& shared) {
  const int lane = gpu::thread() % gpu::kWarp;
  for (int h = gpu::thread() / gpu::kWarp; h < F::kHeads; h += kWarps) {
    const float a = shared.weights[lane * F::kHeads + h], b = shared.weights[(lane + gpu::kWarp) * F::kHeads + h];
    const float top = gpu::warp_max(a > b ? a : b);
    const float p = a > kSawNothing ? gpu::exp(a - top) : 0.0f, q = b > kSawNothing ? gpu::exp(b - top) : 0.0f;
    const float sum = gpu::warp_sum(p + q);
    shared.weights[lane * F::kHeads + h] = p > 0 ? p * scale_of<F::kType>(values, value_stride, lane) : p;
    shared.weights[(lane + gpu::kWarp) * F::kHeads + h] =
        q > 0 ? q * scale_of<F::kType>(values, value_stride, lane + gpu::kWarp) : q;
    if (lane == 0) {
      shared.tops[h] = top;
      shared.sums[h] = sum;
    }
  }
  gpu::barrier();
}

// 128 columns of the values from `begin` on, times weights: [kWarps, heads, 128]. Keys that are not seen have weights
// of 0, but their values are nobody's.
template <typename F>
KT_GPU void multiply_values(const uint8_t* values, int value_stride, int begin, int from, int to,
                            const AttendShared& shared) {
  constexpr int kAhead = 8;
  const int warp = gpu::thread() / gpu::kWarp, lane = gpu::thread() % gpu::kWarp, column = begin + lane * 4;
  float sums[F::kHeads][4] = {};
  KT_UNROLL(1)
  for (int first = warp * kOfWarp; first < (warp + 1) * kOfWarp; first += kAhead) {
    StoredFour<F::kType> stored[kAhead];
    KT_UNROLL(8)
    for (int i = 0; i < kAhead; ++i) {
      const int key = first + i;
      const bool there = column < value_stride && key >= from && key < to;
      stored[i] = there ? stored_four<F::kType>(values + int64_t{key} * value_stride * kv_bytes(F::kType), column)
                        : StoredFour<F::kType>{};
    }
    KT_UNROLL(8)
    for (int i = 0; i < kAhead; ++i) {
      KT_UNROLL(2)
      for (int h = 0; h < F::kHeads; h += 4) {
        const gpu::Words p = gpu::load16(shared.weights + (first + i) * F::kHeads + h);
        KT_UNROLL(4)
        for (int n = 0; n < 4; ++n)
          for (int j = 0; j < 4; ++j)
            sums[h + n][j] = gpu::fma(gpu::float_of(p.word[n]), number_of<F::kType>(stored[i], j), sums[h + n][j]);
      }
    }
  }
  KT_UNROLL(8)
  for (int h = 0; h < F::kHeads; ++h)
    for (int j = 0; j < 4; ++j) shared.values[(warp * F::kHeads + h) * kAttendThreads + lane * 4 + j] = sums[h][j];
  gpu::barrier();
}

// Values of a page: rows [from, to).
struct PageValues {
  const uint8_t* rows;
  int stride, columns, from, to;
};

// Columns of a thread from its c-th on; each is an own step of the compiler's, which keeps them in registers.
template <typename F, int c>
KT_GPU void add_columns(const PageValues& values, const float* fresh, Gathered<F>& all, const AttendShared& shared) {
  if (c * kAttendThreads < values.columns) {
    multiply_values<F>(values.rows, values.stride, c * kAttendThreads, values.from, values.to, shared);
    KT_UNROLL(8)
    for (int h = 0; h < F::kHeads; ++h) {
      float sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += shared.values[(w * F::kHeads + h) * kAttendThreads + gpu::thread()];
      all.own[h][c] = gpu::fma(sum, fresh[h], all.own[h][c]);
    }
    gpu::barrier();
  }
  if constexpr (c + 1 < F::kOwn) add_columns<F, c + 1>(values, fresh, all, shared);
}

template <typename F>
KT_GPU void add_page(const AttendRowsArgs& args, const Seen& seen, int page_number, Gathered<F>& all,
                     const AttendShared& shared) {
  const CachePlane& plane = args.plane;
  const int first = page_number * kKvBlock, kv_head = seen.head / (args.heads / plane.heads);
  const int value_stride = plane.shared ? plane.d_pad : plane.dv_pad;
  const uint8_t* const page = page_of(plane, args.places, seen.token, first);
  const uint8_t* const keys = page + kv_head * plane.key_bytes;
  const uint8_t* const values =
      plane.shared ? keys : page + plane.heads * plane.key_bytes + kv_head * plane.value_bytes;
  score_page<F>(plane, seen, keys, first, shared);
  weigh_page<F>(values, value_stride, shared);
  float fresh[F::kHeads];
  KT_UNROLL(8)
  for (int h = 0; h < F::kHeads; ++h) {
    const float top = shared.tops[h] > all.top[h] ? shared.tops[h] : all.top[h];
    const float old = gpu::exp(all.top[h] - top);
    fresh[h] = gpu::exp(shared.tops[h] - top);
    all.top[h] = top;
    all.sum[h] = all.sum[h] * old + shared.sums[h] * fresh[h];
    KT_UNROLL(5)
    for (int c = 0; c < F::kOwn; ++c) all.own[h][c] *= old;
  }
  const int from = seen.oldest > first ? seen.oldest - first : 0;
  const int to = seen.position - first < kKvBlock - 1 ? seen.position - first + 1 : kKvBlock;
  add_columns<F, 0>({values, value_stride, plane.dv, from, to}, fresh, all, shared);
}

template <typename F>
KT_GPU void clear(Gathered<F>& all) {
  KT_UNROLL(8)
  for (int h = 0; h < F::kHeads; ++h) {
    all.top[h] = kSawNothing;
    all.sum[h] = 0;
    KT_UNROLL(5)
    for (int c = 0; c < F::kOwn; ++c) all.own[h][c] = 0;
  }
}

// Group `group` of the pages that a row sees.
template <typename F>
KT_GPU void gather(const AttendRowsArgs& args, const Seen& seen, int group, Gathered<F>& all,
                   const AttendShared& shared) {
  clear(all);
  const int begin = group * seen.group, end = begin + seen.group < seen.pages ? begin + seen.group : seen.pages;
  for (int page = begin; page < end; ++page) add_page<F>(args, seen, seen.first_page + page, all, shared);
}

// One head of what was gathered, at one column.
template <typename F>
struct Part {
  float top, sum, own[F::kOwn];
};
// What a head of queries begins with: a sink takes part in the sum and has no value.
template <typename F>
KT_GPU Part<F> begun(const AttendRowsArgs& args, int head) {
  return {args.sinks ? args.sinks[head] : kSawNothing, args.sinks ? 1.0f : 0.0f, {}};
}
template <typename F>
KT_GPU void join(Part<F>& all, float top, float sum, const float* own) {
  const float most = top > all.top ? top : all.top;
  const float old = gpu::exp(all.top - most), fresh = gpu::exp(top - most);
  all.top = most;
  all.sum = all.sum * old + sum * fresh;
  KT_UNROLL(5)
  for (int c = 0; c < F::kOwn; ++c) all.own[c] = all.own[c] * old + own[c] * fresh;
}
template <typename F>
KT_GPU void finish(const AttendRowsArgs& args, int token, int head, const Part<F>& all) {
  float* const out = args.out + token * args.out_width + head * args.plane.dv;
  KT_UNROLL(5)
  for (int c = 0; c < F::kOwn; ++c) {
    const int column = gpu::thread() + c * kAttendThreads;
    if (column < args.plane.dv) out[column] = all.own[c] / all.sum;
  }
}
KT_GPU float* part_of(const AttendRowsArgs& args, int token, int head, int number) {
  const int64_t at = (int64_t{token} * args.heads + head) * args.groups + number;
  return args.parts + at * (args.plane.dv + 2);
}

// All groups of a row, one after the other, joined as kt_attend_join does.
template <typename F>
KT_GPU void attend_all(const AttendRowsArgs& args, const Seen& seen, const AttendShared& shared) {
  Part<F> parts[F::kHeads];
  KT_UNROLL(8)
  for (int h = 0; h < F::kHeads; ++h) parts[h] = begun<F>(args, h < seen.heads ? seen.head + h : seen.head);
  Gathered<F> all;
  for (int group = 0; group < seen.groups(); ++group) {
    gather<F>(args, seen, group, all, shared);
    KT_UNROLL(8)
    for (int h = 0; h < F::kHeads; ++h) join(parts[h], all.top[h], all.sum[h], all.own[h]);
  }
  KT_UNROLL(8)
  for (int h = 0; h < F::kHeads; ++h)
    if (h < seen.heads) finish(args, seen.token, seen.head + h, parts[h]);
}

// Rows that are nobody's have no keys.
template <typename F>
KT_GPU void attend_nothing(const AttendRowsArgs& args, int token, int head) {
  finish<F>(args, token, head, {0.0f, 1.0f, {}});
}

template <typename F>
KT_GPU void attend(const AttendRowsArgs& args, const AttendShared& shared) {
  if (args.groups == 0) {  // blocks [heads that share keys, tokens]
    const Seen seen = seen_by_block(args, gpu::block_y(), gpu::block(), F::kHeads);
    if (!live(args.places, seen.token)) {
      for (int h = 0; h < seen.heads; ++h) attend_nothing<F>(args, seen.token, seen.head + h);
      return;
    }
    load_queries(args, seen, F::kHeads, shared.query);
    return attend_all<F>(args, seen, shared);
  }
  // Blocks [heads that share keys, tokens * groups]: a group each, for kt_attend_join.
  const Seen seen = seen_by_block(args, gpu::block_y() / args.groups, gpu::block(), F::kHeads);
  const int number = gpu::block_y() % args.groups;
  if (number >= seen.groups() || !live(args.places, seen.token)) return;
  load_queries(args, seen, F::kHeads, shared.query);
  Gathered<F> all;
  gather<F>(args, seen, number, all, shared);
  KT_UNROLL(8)
  for (int h = 0; h < F::kHeads; ++h) {
    const bool there = h < seen.heads;
    float* const to = part_of(args, seen.token, seen.head + (there ? h : 0), number);
    if (there && gpu::thread() == 0) {
      to[0] = all.top[h];
      to[1] = all.sum[h];
    }
    KT_UNROLL(5)
    for (int c = 0; c < F::kOwn; ++c) {
      const int column = gpu::thread() + c * kAttendThreads;
      if (there && column < args.plane.dv) to[2 + column] = all.own[h][c];
    }
  }
}

// Blocks of 128 threads. Where values have more than 128 columns, fewer heads.
#define KT_ATTEND(name, type, heads, own)                           \
  KT_KERNEL(name, AttendRowsArgs, args, kAttendThreads) {           \
    KT_SHARED(float, query, (heads) * kMostColumns);                \
    KT_SHARED(float, weights, kKvBlock * (heads));                  \
    KT_SHARED(float, tops, heads);                                  \
    KT_SHARED(float, sums, heads);                                  \
    KT_SHARED(float, values, kWarps * (heads) * kAttendThreads);    \
    using Those = Form<type, heads, own>;                           \
    attend<Those>(args, {query, weights, tops, sums, values});      \
  }
constexpr int kMostOwn = kMostColumns / kAttendThreads;
constexpr int kJoined = 4;  // parts that are loaded together
KT_ATTEND(kt_attend_f32, KvType::kF32, kAttendHeads, 1)
KT_ATTEND(kt_attend_bf16, KvType::kBf16, kAttendHeads, 1)
KT_ATTEND(kt_attend_int8, KvType::kS8, kAttendHeads, 1)
KT_ATTEND(kt_attend_wide_f32, KvType::kF32, kAttendWideHeads, kMostOwn)
KT_ATTEND(kt_attend_wide_bf16, KvType::kBf16, kAttendWideHeads, kMostOwn)
KT_ATTEND(kt_attend_wide_int8, KvType::kS8, kAttendWideHeads, kMostOwn)

// Blocks [heads, tokens]: what the groups gave, in order.
KT_KERNEL(kt_attend_join, AttendRowsArgs, args, kAttendThreads) {
  using Those = Form<KvType::kF32, 1, kMostOwn>;
  const int token = gpu::block_y(), head = gpu::block();
  if (!live(args.places, token)) return attend_nothing<Those>(args, token, head);
  const Seen seen = seen_by(args, token, head, 1);
  Part<Those> all = begun<Those>(args, head);
  const int groups = seen.groups();
  KT_UNROLL(1)
  for (int first = 0; first < groups; first += kJoined) {
    Part<Those> some[kJoined];
    KT_UNROLL(4)
    for (int i = 0; i < kJoined; ++i) {
      const float* const from = part_of(args, token, head, first + i < groups ? first + i : first);
      some[i].top = from[0];
      some[i].sum = from[1];
      KT_UNROLL(5)
      for (int c = 0; c < kMostOwn; ++c) {
        const int column = gpu::thread() + c * kAttendThreads;
        some[i].own[c] = column < args.plane.dv ? from[2 + column] : 0.0f;
      }
    }
    KT_UNROLL(4)
    for (int i = 0; i < kJoined; ++i)
      if (first + i < groups) join(all, some[i].top, some[i].sum, some[i].own);
  }
  finish(args, token, head, all);
}

}  // namespace kt::inline cuda
