#include "nn/kv_write.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

namespace kt {
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

// One row of numbers as codes of the cache's type; s8 with its scale.
class RowCodes {
 public:
  RowCodes(const Kernels& kernels, KvType type, int width)
      : kernels_(kernels), type_(type), width_(width), codes_(static_cast<size_t>(width) * 4) {}

  const std::byte* of(const float* row) {
    if (type_ == KvType::kF32) return reinterpret_cast<const std::byte*>(row);
    if (type_ == KvType::kBf16) {
      kernels_.store(codes_.data(), Real::kBf16, row, width_);
      return codes_.data();
    }
    float most = 0;
    for (int i = 0; i < width_; ++i) most = std::max(most, std::fabs(row[i]));
    scale = most / 127;
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (int i = 0; i < width_; ++i)
      codes_[static_cast<size_t>(i)] =
          static_cast<std::byte>(static_cast<int8_t>(std::lrint(row[i] * inverse)));
    return codes_.data();
  }
  float scale = 0;  // of the last row

 private:
  const Kernels& kernels_;
  KvType type_;
  int width_;
  std::vector<std::byte> codes_;
};

template <typename Code>
void scatter(std::byte* block, Side side, int width_pad, int slot, const std::byte* codes, int width) {
  constexpr int kPack = 4 / sizeof(Code);
  const auto* from = reinterpret_cast<const Code*>(codes);
  auto* to = reinterpret_cast<Code*>(block);
  for (int i = 0; i < width; ++i)
    to[side == Side::kKeys ? key_place(kPack, slot, i) : value_place(kPack, width_pad, slot, i)] = from[i];
}

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
    else
      put(run, values, Side::kValues, shape.dv, shape.dv_pad(), args.v + head * shape.dv, args.v_stride);
  }

  void put(const Run& run, std::byte* block, Side side, int width, int width_pad, const float* rows,
           int64_t stride) const {
    const KvType type = cache.shape(args.plane).type;
    if (side == Side::kValues && run.begin % kPageTokens == 0)
      std::memset(block, 0, cache.shape(args.plane).block_bytes(width_pad));
    auto* scales = reinterpret_cast<float*>(block + static_cast<size_t>(kPageTokens * width_pad));
    RowCodes codes(kernels, type, width);
    for (int position = run.begin; position < run.end; ++position) {
      const int slot = position % kPageTokens, row = run.sequence->first + position - run.sequence->position;
      const std::byte* from = codes.of(rows + row * stride);
      if (type == KvType::kF32) {
        scatter<uint32_t>(block, side, width_pad, slot, from, width);
      } else if (type == KvType::kBf16) {
        scatter<uint16_t>(block, side, width_pad, slot, from, width);
      } else {
        scatter<uint8_t>(block, side, width_pad, slot, from, width);
        scales[slot] = codes.scale;
      }
    }
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

}  // namespace kt
