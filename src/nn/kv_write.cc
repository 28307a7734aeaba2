#include "nn/kv_write.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "kernels/row_ops.h"

namespace kt::inline nn {
namespace {

constexpr int kRowsAlone = 16;  // rows of keys that are not worth waking the others for

// New tokens of one sequence that fall into one page.
struct Run {
  const AttentionSequence* sequence;
  int begin, end;  // positions
};

std::vector<Run> runs_of(std::span<const AttentionSequence> sequences) {
  std::vector<Run> out;
  for (const AttentionSequence& sequence : sequences) {
    const int last = sequence.position + sequence.count;
    for (int at = sequence.position; at < last;) {
      const int end = std::min(last, (at / kPageTokens + 1) * kPageTokens);
      out.push_back({&sequence, at, end});
      at = end;
    }
  }
  return out;
}

enum class Side { kKeys, kValues };

struct Writer {
  KvCache& cache;
  const Kernels& kernels;
  const CacheWrite& args;

  void write(const Run& run, int head) const {
    const KvShape& shape = cache.shape(args.plane);
    const int page = run.sequence->pages[run.begin / kPageTokens];
    if (!shape.shared)
      put(run, cache.keys(args.plane, page, head), Side::kKeys, shape.d, shape.d_pad(),
          args.k + head * shape.d, args.k_stride);
    std::byte* values = cache.values(args.plane, page, head);
    if (shape.shared)
      put(run, values, Side::kValues, shape.d, shape.d_pad(), args.k + head * shape.d, args.k_stride);
    else if (shape.has_values())
      put(run, values, Side::kValues, shape.dv, shape.dv_pad(), args.v + head * shape.dv, args.v_stride);
  }

  void put(const Run& run, std::byte* block, Side side, int width, int width_pad, const float* rows,
           int64_t stride) const {
    const KvType type = cache.shape(args.plane).type;
    if (side == Side::kValues && run.begin % kPageTokens == 0)
      std::memset(block, 0, cache.shape(args.plane).block_bytes(width_pad));
    auto* scales = reinterpret_cast<float*>(block + static_cast<size_t>(kPageTokens * width_pad));
    const int first = run.sequence->first + run.begin - run.sequence->position;
    kernels.rows->write_cache({.type = type,
                               .keys = side == Side::kKeys,
                               .rows = rows + first * stride,
                               .stride = stride,
                               .count = run.end - run.begin,
                               .slot = run.begin % kPageTokens,
                               .width = width,
                               .width_pad = width_pad,
                               .block = block,
                               .scales = scales});
  }
};

}  // namespace

void write_cache(KvCache& cache, Pool& pool, const Kernels& kernels, const CacheWrite& args) {
  const std::vector<Run> runs = runs_of(args.sequences);
  const Writer writer{cache, kernels, args};
  const int heads = cache.shape(args.plane).heads, items = static_cast<int>(runs.size()) * heads;
  const auto item = [&](int i) { writer.write(runs[static_cast<size_t>(i / heads)], i % heads); };
  int tokens = 0;
  for (const Run& run : runs) tokens += run.end - run.begin;
  if (tokens * heads <= kRowsAlone) {
    for (int i = 0; i < items; ++i) item(i);
    return;
  }
  std::atomic<int> next{0};
  pool.run([&](const Worker&) {
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) item(i);
  });
}

}  // namespace kt::inline nn
