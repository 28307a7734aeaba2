// What happens to queries, keys and values: norms of heads and rotation, pages of the cache, softmax over them.
#include "cuda/gpu.h"
#include "cuda/kernels/args.h"
#include "formats/kv_type.h"

namespace kt {

// A block for each row.
KT_KERNEL(kt_rotate, RotateRowsArgs, args, 256) {
  KT_SHARED(float, partial, 8);
  const int token = gpu::block();
  float* const row = args.x + token * args.width;
  for (int n = 0; args.norm && n < args.norms; ++n) {
    float* const x = row + n * args.norm_size;
    float sum = 0;
    for (int i = gpu::thread(); i < args.norm_size; i += gpu::threads()) sum = gpu::fma(x[i], x[i], sum);
    const float mean = gpu::block_sum(sum, partial) / static_cast<float>(args.norm_size);
    const float factor = 1.0f / gpu::sqrt(mean + args.eps);
    for (int i = gpu::thread(); i < args.norm_size; i += gpu::threads()) x[i] = x[i] * factor * args.norm[i];
    gpu::barrier();
  }
  for (int i = gpu::thread(); i < args.heads * args.half; i += gpu::threads()) {
    const int head = i / args.half, pair = i % args.half;
    float* const x = row + head * args.stride + args.rotated;
    float& a = x[args.interleaved ? 2 * pair : pair];
    float& b = x[args.interleaved ? 2 * pair + 1 : pair + args.half];
    const float c = args.cosines[token * args.half + pair], s = args.sines[token * args.half + pair];
    const float first = a * c - b * s, second = b * c + a * s;
    a = first;
    b = second;
  }
  if (!args.growth || args.growth[token] == 1.0f) return;
  gpu::barrier();
  for (int64_t i = gpu::thread(); i < args.heads * args.stride; i += gpu::threads()) row[i] *= args.growth[token];
}

// A token's numbers of one head into its row of a block.
KT_GPU void write_row(KvType type, const float* x, int width, int padded, int slot, uint8_t* block, float* partial) {
  if (type == KvType::kS8) {
    float largest = 0;
    for (int i = gpu::thread(); i < width; i += gpu::threads()) {
      const float size = x[i] < 0 ? -x[i] : x[i];
      largest = size > largest ? size : largest;
    }
    largest = gpu::block_max(largest, partial);
    const float scale = largest / 127.0f, inverse = largest > 0 ? 127.0f / largest : 0.0f;
    auto* const codes = reinterpret_cast<int8_t*>(block) + slot * padded;
    for (int i = gpu::thread(); i < padded; i += gpu::threads())
      codes[i] = i < width ? static_cast<int8_t>(gpu::round(x[i] * inverse)) : int8_t{0};
    if (gpu::thread() == 0) reinterpret_cast<float*>(block + kKvBlock * padded)[slot] = scale;
    gpu::barrier();
    return;
  }
  for (int i = gpu::thread(); i < padded; i += gpu::threads()) {
    const float value = i < width ? x[i] : 0.0f;
    if (type == KvType::kF32)
      reinterpret_cast<float*>(block)[slot * padded + i] = value;
    else
      reinterpret_cast<uint16_t*>(block)[slot * padded + i] = gpu::to_bf16(value);
  }
}

// Whether a row of a step is a token's.
KT_GPU bool live(const TokenPlaces& places, int row) { return !places.step || row < places.step->tokens; }

KT_GPU uint8_t* page_of(const CachePlane& plane, const TokenPlaces& places, int token, int position) {
  const int page = places.pages[places.first_pages[token] + position / kKvBlock];
  return plane.memory + page * plane.page_bytes;
}

// Blocks [heads, tokens].
KT_KERNEL(kt_write_cache, WriteCacheArgs, args, 64) {
  KT_SHARED(float, partial, 2);
  const CachePlane& plane = args.plane;
  const int head = gpu::block(), token = gpu::block_y(), position = args.places.positions[token];
  if (!live(args.places, token)) return;
  const auto type = static_cast<KvType>(plane.type);
  uint8_t* const page = page_of(plane, args.places, token, position);
  write_row(type, args.k + token * args.k_width + head * plane.d, plane.d, plane.d_pad, position % kKvBlock,
            page + head * plane.key_bytes, partial);
  if (plane.shared) return;
  write_row(type, args.v + token * args.v_width + head * plane.dv, plane.dv, plane.dv_pad, position % kKvBlock,
            page + plane.heads * plane.key_bytes + head * plane.value_bytes, partial);
}

// Number `at` of a block, without the scale of its row.
template <KvType kType>
KT_GPU float cached(const uint8_t* block, int64_t at) {
  if constexpr (kType == KvType::kF32) return reinterpret_cast<const float*>(block)[at];
  if constexpr (kType == KvType::kBf16) return gpu::from_bf16(reinterpret_cast<const uint16_t*>(block)[at]);
  return static_cast<float>(reinterpret_cast<const int8_t*>(block)[at]);
}
template <KvType kType>
KT_GPU float scale_of(const uint8_t* block, int padded, int slot) {
  return kType == KvType::kS8 ? reinterpret_cast<const float*>(block + kKvBlock * padded)[slot] : 1.0f;
}

// query . row, both padded with zeros to whole 16 bytes.
template <KvType kType>
KT_GPU float dot_of(const float* query, const uint8_t* row, int padded) {
  constexpr int kNumbers = 16 / kv_bytes(kType), kInWord = kNumbers / 4;
  float sum = 0;
  for (int i = 0; i < padded; i += kNumbers) {
    const gpu::Words words = gpu::load16(row + i * kv_bytes(kType));
    for (int w = 0; w < 4; ++w) {
      for (int j = 0; j < kInWord; ++j) {
        float number;
        if constexpr (kType == KvType::kF32)
          number = gpu::float_of(words.word[w]);
        else if constexpr (kType == KvType::kBf16)
          number = gpu::float_of(j == 0 ? words.word[w] << 16 : words.word[w] & 0xFFFF0000u);
        else
          number = static_cast<float>(static_cast<int8_t>(words.word[w] >> 8 * j));
        sum = gpu::fma(query[i + w * kInWord + j], number, sum);
      }
    }
  }
  return sum;
}

constexpr int kOwnColumns = kMostColumns / kKvBlock;  // of a thread: its number and every 64th behind it
constexpr float kSawNothing = -3.0e38f;

// Softmax over some keys, not divided yet: exp(score - top) summed, and of values times that.
struct Gathered {
  float top, sum, own[kOwnColumns];
};

KT_GPU void join(Gathered& all, const Gathered& more) {
  const float top = more.top > all.top ? more.top : all.top;
  const float old = gpu::exp(all.top - top), fresh = gpu::exp(more.top - top);
  all.top = top;
  all.sum = all.sum * old + more.sum * fresh;
  for (int c = 0; c < kOwnColumns; ++c) all.own[c] = all.own[c] * old + more.own[c] * fresh;
}

// Memory that the threads of such a block share.
struct AttendShared {
  float *query, *weights, *tops, *sums;
};

// What one row and head of queries sees.
struct Seen {
  int token, head, position, oldest;
};
KT_GPU Seen seen_by(const AttendRowsArgs& args, int token, int head) {
  const int position = args.places.positions[token];
  const int oldest = args.window > 0 && position - args.window + 1 > 0 ? position - args.window + 1 : 0;
  return {token, head, position, oldest};
}

KT_GPU void load_query(const AttendRowsArgs& args, const Seen& seen, float* query) {
  const CachePlane& plane = args.plane;
  for (int i = gpu::thread(); i < plane.d_pad; i += gpu::threads())
    query[i] = i < plane.d ? args.q[seen.token * args.q_width + seen.head * plane.d + i] * args.scale : 0.0f;
  gpu::barrier();
}

// A group of pages, a page at a time: a key for each thread, then columns of the values. Groups lie at fixed places, so
// that a row gets the same whoever computes which of them.
template <KvType kType>
KT_GPU Gathered attend_group(const AttendRowsArgs& args, const Seen& seen, int group, const AttendShared& shared) {
  const CachePlane& plane = args.plane;
  const int kv_head = seen.head / (args.heads / plane.heads), me = gpu::thread();
  const int value_stride = plane.shared ? plane.d_pad : plane.dv_pad;
  Gathered out{kSawNothing, 0.0f, {}};
  const int begin = group * kAttendGroup * kKvBlock, end = begin + kAttendGroup * kKvBlock;
  const int from = seen.oldest > begin ? seen.oldest / kKvBlock * kKvBlock : begin;
  for (int first = from; first < end && first <= seen.position; first += kKvBlock) {
    const uint8_t* const page = page_of(plane, args.places, seen.token, first);
    const uint8_t* const keys = page + kv_head * plane.key_bytes;
    const uint8_t* const values =
        plane.shared ? keys : page + plane.heads * plane.key_bytes + kv_head * plane.value_bytes;
    const bool sees = first + me >= seen.oldest && first + me <= seen.position;
    float score = kSawNothing;
    if (sees)
      score = dot_of<kType>(shared.query, keys + int64_t{me} * plane.d_pad * kv_bytes(kType), plane.d_pad) *
              scale_of<kType>(keys, plane.d_pad, me);
    float top = gpu::block_max(score, shared.tops);
    top = top > out.top ? top : out.top;
    const float weight = sees ? gpu::exp(score - top) : 0.0f, old = gpu::exp(out.top - top);
    shared.weights[me] = sees ? weight * scale_of<kType>(values, value_stride, me) : 0.0f;
    out.sum = out.sum * old + gpu::block_sum(weight, shared.sums);
    out.top = top;
    for (int c = 0; c < kOwnColumns; ++c) out.own[c] *= old;
    const int last = seen.position - first < kKvBlock - 1 ? seen.position - first + 1 : kKvBlock;
    for (int key = seen.oldest > first ? seen.oldest - first : 0; key < last; ++key) {
      const float p = shared.weights[key];
      for (int c = 0; c < kOwnColumns; ++c)
        if (me + c * kKvBlock < plane.dv)
          out.own[c] =
              gpu::fma(p, cached<kType>(values, int64_t{key} * value_stride + me + c * kKvBlock), out.own[c]);
    }
    gpu::barrier();
  }
  return out;
}

// What a head of queries begins with: a sink takes part in the sum and has no value.
KT_GPU Gathered begun(const AttendRowsArgs& args, int head) {
  return {args.sinks ? args.sinks[head] : kSawNothing, args.sinks ? 1.0f : 0.0f, {}};
}
KT_GPU void finish(const AttendRowsArgs& args, const Seen& seen, const Gathered& all) {
  float* const out = args.out + seen.token * args.out_width + seen.head * args.plane.dv;
  for (int c = 0; c < kOwnColumns; ++c) {
    const int column = gpu::thread() + c * kKvBlock;
    if (column < args.plane.dv) out[column] = all.own[c] / all.sum;
  }
}
KT_GPU float* part_of(const AttendRowsArgs& args, const Seen& seen, int number) {
  const int64_t at = (int64_t{seen.token} * args.heads + seen.head) * args.groups + number;
  return args.parts + at * (args.plane.dv + 2);
}

template <KvType kType>
KT_GPU void attend(const AttendRowsArgs& args, const AttendShared& shared) {
  constexpr int kKeys = kAttendGroup * kKvBlock;
  if (args.groups == 0) {  // blocks [heads, tokens]
    const Seen seen = seen_by(args, gpu::block_y(), gpu::block());
    if (!live(args.places, seen.token)) return finish(args, seen, {0.0f, 1.0f, {}});
    load_query(args, seen, shared.query);
    Gathered all = begun(args, seen.head);
    for (int group = seen.oldest / kKeys; group <= seen.position / kKeys; ++group)
      join(all, attend_group<kType>(args, seen, group, shared));
    return finish(args, seen, all);
  }
  // Blocks [heads, tokens * groups]: a group each, for kt_attend_join.
  const Seen seen = seen_by(args, gpu::block_y() / args.groups, gpu::block());
  const int number = gpu::block_y() % args.groups, group = seen.oldest / kKeys + number;
  if (group > seen.position / kKeys || !live(args.places, seen.token)) return;
  load_query(args, seen, shared.query);
  const Gathered part = attend_group<kType>(args, seen, group, shared);
  float* const to = part_of(args, seen, number);
  if (gpu::thread() == 0) {
    to[0] = part.top;
    to[1] = part.sum;
  }
  for (int c = 0; c < kOwnColumns; ++c) {
    const int column = gpu::thread() + c * kKvBlock;
    if (column < args.plane.dv) to[2 + column] = part.own[c];
  }
}

// Blocks of 64 threads.
#define KT_ATTEND(name, type)                             \
  KT_KERNEL(name, AttendRowsArgs, args, 64) {             \
    KT_SHARED(float, query, kMostColumns);                \
    KT_SHARED(float, weights, kKvBlock);                  \
    KT_SHARED(float, tops, 2);                            \
    KT_SHARED(float, sums, 2);                            \
    attend<type>(args, {query, weights, tops, sums});     \
  }
KT_ATTEND(kt_attend_f32, KvType::kF32)
KT_ATTEND(kt_attend_bf16, KvType::kBf16)
KT_ATTEND(kt_attend_int8, KvType::kS8)

// Blocks [heads, tokens]: what the groups gave, in order.
KT_KERNEL(kt_attend_join, AttendRowsArgs, args, 64) {
  constexpr int kKeys = kAttendGroup * kKvBlock;
  const Seen seen = seen_by(args, gpu::block_y(), gpu::block());
  if (!live(args.places, seen.token)) return finish(args, seen, {0.0f, 1.0f, {}});
  Gathered all = begun(args, seen.head);
  for (int number = 0; seen.oldest / kKeys + number <= seen.position / kKeys; ++number) {
    const float* const from = part_of(args, seen, number);
    Gathered part{from[0], from[1], {}};
    for (int c = 0; c < kOwnColumns; ++c) {
      const int column = gpu::thread() + c * kKvBlock;
      if (column < args.plane.dv) part.own[c] = from[2 + column];
    }
    join(all, part);
  }
  finish(args, seen, all);
}

}  // namespace kt
