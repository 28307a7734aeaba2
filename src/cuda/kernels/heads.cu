// What happens to queries, keys and values before attention: norms of heads, rotation, pages of the cache.
#include "cuda/kernels/pages.h"

namespace kt::inline cuda {

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

// One head of a row: as kt_rotate, by all threads of a block, where norms are of heads.
KT_GPU void finish_head(const RotateRowsArgs& args, int token, int head, float* partial) {
  float* const x = args.x + token * args.width + head * args.stride;
  if (args.norm) {
    float sum = 0;
    for (int i = gpu::thread(); i < args.norm_size; i += gpu::threads()) sum = gpu::fma(x[i], x[i], sum);
    const float mean = gpu::block_sum(sum, partial) / static_cast<float>(args.norm_size);
    const float factor = 1.0f / gpu::sqrt(mean + args.eps);
    for (int i = gpu::thread(); i < args.norm_size; i += gpu::threads()) x[i] = x[i] * factor * args.norm[i];
    gpu::barrier();
  }
  for (int pair = gpu::thread(); pair < args.half; pair += gpu::threads()) {
    float& a = x[args.rotated + (args.interleaved ? 2 * pair : pair)];
    float& b = x[args.rotated + (args.interleaved ? 2 * pair + 1 : pair + args.half)];
    const float c = args.cosines[token * args.half + pair], s = args.sines[token * args.half + pair];
    const float first = a * c - b * s, second = b * c + a * s;
    a = first;
    b = second;
  }
  gpu::barrier();
  if (!args.growth || args.growth[token] == 1.0f) return;
  for (int64_t i = gpu::thread(); i < args.stride; i += gpu::threads()) x[i] *= args.growth[token];
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

// A head of keys and one of values into the page of their token.
KT_GPU void write_head(const WriteCacheArgs& args, int token, int head, float* partial) {
  const CachePlane& plane = args.plane;
  const int position = args.places.positions[token];
  if (!live(args.places, token)) return;
  const auto type = static_cast<KvType>(plane.type);
  uint8_t* const page = page_of(plane, args.places, token, position);
  write_row(type, args.k + token * args.k_width + head * plane.d, plane.d, plane.d_pad, position % kKvBlock,
            page + head * plane.key_bytes, partial);
  if (plane.shared) return;
  write_row(type, args.v + token * args.v_width + head * plane.dv, plane.dv, plane.dv_pad, position % kKvBlock,
            page + plane.heads * plane.key_bytes + head * plane.value_bytes, partial);
}

// Blocks [heads, tokens].
KT_KERNEL(kt_write_cache, WriteCacheArgs, args, 64) {
  KT_SHARED(float, partial, 2);
  write_head(args, gpu::block_y(), gpu::block(), partial);
}

// Blocks [heads of queries and of keys, tokens], where each head has a norm of its own or none.
KT_KERNEL(kt_finish_heads, FinishHeadsArgs, args, 128) {
  KT_SHARED(float, partial, 4);
  const int head = gpu::block() - args.q.heads, token = gpu::block_y();
  if (head < 0) return finish_head(args.q, token, gpu::block(), partial);
  finish_head(args.k, token, head, partial);
  write_head(args.write, token, head, partial);
}

}  // namespace kt::inline cuda
