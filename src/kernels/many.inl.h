// Many rows: the packed weights of two or three row blocks by one K block are widened into a panel in scratch
// (or taken as they lie, when the packed codes are a panel already) and multiplied with all rows. One tile
// loop per product.
//
// Order: group of `panel_blocks` row blocks > chunk of rows > K block > panel of row blocks > tile of rows.
// The panel stays in L1 while the rows' A block streams from L2, where it stays for all panels of the group.
// Sums wait in C between K blocks; a rounded panel has scales of its own, so its sums are added to the output
// at once. The packed codes are read in order and once, which the hardware fetches ahead; prefetches of our
// own cost 10 % here.
//
// A tile unit multiplies faster than L2 delivers and pays for every visit to sums in memory. So its panels
// are of three row blocks and as much of K as they hold, mostly all: then no sums wait, and the order is
// panel > tile of rows. Whole-row formats are widened beside the first tile of rows.
#pragma once
#include <type_traits>

#include "kernels/far_sums.inl.h"
#include "kernels/plan.h"

namespace KT_ISA_NAMESPACE {
namespace {

enum class Fold : uint8_t { kExact, kRounded, kFloat, kSpans };

// Row blocks of the next panel out of `left`: a single one last would waste half the loads.
constexpr int panel_width(int left) {
  return kPanelWidth == 3 && left == 4 ? 2 : left < kPanelWidth ? left : kPanelWidth;
}

// Columns of a K block: for a tile unit as many as the panel holds, in even parts.
template <class Product>
constexpr int k_block_of(int k_pad, int plain) {
  if (!Isa::kTileUnit || Product::kCodeBytes == 4) return plain;
  constexpr int kMost = kPanelBytes / (kPanelRows * Product::kCodeBytes);
  const int parts = (k_pad + kMost - 1) / kMost;
  return ((k_pad + parts - 1) / parts + kChunk - 1) / kChunk * kChunk;
}

// Whole-row formats are widened beside the products of a tile unit, 64 columns at a time and again for each
// tile of rows: the codes are fewer bytes from L2 than their panel, which stays in L1 as a ring of kRing
// steps.
template <Layout kL>
struct Chunks {
  static constexpr bool kBeside = Isa::kTileUnit && kL.code != Code::kI8;
  static constexpr int kBytes = chunk_bytes(kL.code);  // of a row block's codes
  // Step `chunk` of each row block, from the codes of its first to the ring at `to`.
  static __attribute__((noinline)) void widen(const uint8_t* codes, int64_t stride, int blocks, int chunk,
                                              uint8_t* to, int64_t to_stride) {
    const auto table = iq4_table();
    codes += static_cast<int64_t>(chunk) * kBytes;
    for (int b = 0; b < blocks; ++b) widen_chunk<kL>(codes + b * stride, to + b * to_stride, table);
  }
};
struct NoChunks {
  static constexpr bool kBeside = false;
};
inline constexpr int kRing = 4;         // steps of a ring
inline constexpr int kRingRows = 96;    // with more rows a whole panel, widened once, is the faster
inline constexpr int kChunksAhead = 2;  // of the product that takes them

// A tile of sums on its way to the output: s8: (C - bias * sum) * (wscale * ascale), or added to it.
struct Folding {
  const void* c = nullptr;  // [rows, kPanelRows]
  const HighSums* high = nullptr;
  int rows = 0, columns = 0, bias = 0;
  bool add = false;
  const float* scales = nullptr;
  const float* row_scales = nullptr;
  const int32_t* row_sums = nullptr;
  int64_t scale_step = 0, sum_step = 0;
  float* out = nullptr;
  int64_t ld = 0;
};

template <bool kHigh>
KT_INLINE void fold_s8(const Folding& f) {
  const auto* c = static_cast<const int32_t*>(f.c);
  const float *row_scale = f.row_scales, *const scales = f.scales;
  const int32_t* row_sum = f.row_sums;
  float* to = f.out;
  for (int i = 0; i < f.rows; ++i, c += kPanelRows, to += f.ld) {
    const auto a = Isa::set1(*row_scale);
    const auto shift = Isa::set1(static_cast<int32_t>(f.bias * *row_sum));
    row_scale += f.scale_step;
    row_sum += f.sum_step;
    for (int j = 0; j < f.columns; j += Isa::kLanes) {
      auto whole = Isa::sub(Isa::load(c + j), shift);
      if constexpr (kHigh) whole = Isa::add(whole, f.high->at(i, j));
      const auto x = Isa::to_f32(whole);
      const auto scale = Isa::mul(Isa::load(scales + j), a);
      // not mul: few starts from +0 as well, and 0 * -scale must not become -0 here alone
      Isa::store(to + j, Isa::fma(x, scale, f.add ? Isa::load(to + j) : Isa::set1(0.0f)));
    }
  }
}

KT_INLINE void fold_f32(const Folding& f) {
  const auto* c = static_cast<const float*>(f.c);
  for (int i = 0; i < f.rows; ++i, c += kPanelRows)
    for (int j = 0; j < f.columns; j += Isa::kLanes) Isa::store(f.out + i * f.ld + j, Isa::load(c + j));
}

template <class Product, Fold kFold>
KT_INLINE Folding folding_of(const MultiplyArgs& args, const PanelWork& w, int row, int rows, const void* c) {
  Folding f{.c = c,
            .rows = args.m - row < rows ? args.m - row : rows,
            .columns = w.panel.blocks * kBlockRows,
            .scales = w.scales,
            .out = w.out + row * args.ld,
            .ld = args.ld};
  if constexpr (Product::kCodeBytes == 1) {
    const ActShape& s = args.acts.shape;
    const int k0 = kFold == Fold::kRounded ? w.k0 : 0;
    f.scale_step = s.scale_spans();
    f.sum_step = s.sum_spans();
    f.row_scales = args.acts.scales + row * f.scale_step + k0 / s.scale_span;
    f.row_sums = args.acts.sums + row * f.sum_step + k0 / s.sum_span;
    f.bias = kFold == Fold::kExact ? args.packing->bias : Isa::kUnsigned ? 128 : 0;
    f.add = k0 > 0;
  }
  return f;
}

KT_INLINE Ahead ahead_of(const PanelWork& w) {
  if (!w.next) return {};
  return {.at = w.next,
          .end = w.next + w.next_bytes,
          .stride = w.next_stride - w.next_bytes,
          .bytes = w.next_bytes,
          .more = w.next_blocks - 1};
}

// The chunks that step s + kChunksAhead will take.
template <class Chunks>
KT_INLINE void widen_ahead(const PanelWork& w, const Panel& panel, int s, int steps) {
  int chunk = s + kChunksAhead;
  uint8_t* to = w.ring + ((panel.phase + int64_t{chunk} * kStepBytes) & panel.mask);
  if (chunk >= steps && !w.again) return;
  while (chunk >= steps) chunk -= steps;
  Chunks::widen(w.codes, w.code_stride, panel.blocks, chunk, to, panel.stride);
}

template <class Product, bool kSmall, Fold kFold, class Chunks>
__attribute__((noinline)) void multiply_panel(const MultiplyArgs& args, const PanelWork& w) {
  using C = typename Product::C;
  const int k_pad = args.packing->k_pad;
  const bool first = kFold == Fold::kRounded || w.k0 == 0, last = w.k1 == k_pad;
  const bool waits = kFold != Fold::kRounded && !(first && last);
  const int steps = (w.k1 - w.k0) * Product::kCodeBytes / 64;
  Ahead ahead = ahead_of(w);
  const int64_t visits = int64_t{steps} * ((w.rows + kRowsAtOnce - 1) / kRowsAtOnce);
  const int quads = static_cast<int>((w.next_blocks * w.next_bytes / 256 + visits - 1) / visits);  // a step
  Panel panel = w.panel;
  constexpr bool kHigh = kFold == Fold::kExact;
  std::conditional_t<kHigh, HighSums, Nothing> high;
  for (int i = 0; i < w.rows; i += kRowsAtOnce) {
    const int left = (Product::kCodeBytes == 4 && args.m - w.row0 < w.rows ? args.m - w.row0 : w.rows) - i;
    if (left <= 0) break;  // padding, which a product of any number of rows has no need of
    const int some = left < kRowsAtOnce ? left : kRowsAtOnce;
    bool any = false;  // far codes
    if constexpr (kHigh) any = high.begin(args.acts, w, i, some);
    const int slots = some / 16 * panel.blocks;  // of beside, a step
    C* c = reinterpret_cast<C*>(w.sums) + (waits ? static_cast<int64_t>(i) * kPanelRows : 0);
    const std::byte* a = args.acts.codes + (static_cast<int64_t>(w.row0 + i) * k_pad +
                                            static_cast<int64_t>(w.k0) * act_side<Product>()) *
                                               Product::kCodeBytes;
    Product::template panel<kSmall>(a, k_pad, some, panel, w.k1 - w.k0, c, kPanelRows, first,
                                    [&](int s, auto slot) __attribute__((always_inline)) {
                                      if (slot.value < quads)
                                        for (int q = slot.value; q < quads; q += slots) ahead.fetch_four();
                                      if constexpr (Chunks::kBeside) {
                                        if ((i == 0 || w.again) && slot.value == 0)
                                          widen_ahead<Chunks>(w, panel, s, steps);
                                      }
                                      if constexpr (kHigh && Isa::kTileUnit) {
                                        if (any && slot.value == 0) high.template add<kSmall>(panel, s, 0);
                                        if (any && slot.value == panel.blocks)
                                          high.template add<kSmall>(panel, s, 1);
                                      }
                                    });
    if constexpr (kHigh && !Isa::kTileUnit)
      for (int g = 0; any && g < some / kManySide; ++g)
        for (int s = 0; s < steps; ++s) high.template add<kSmall>(panel, s, g);
    if constexpr (Chunks::kBeside) panel.phase += w.again ? steps * kStepBytes : 0;
    if (kFold != Fold::kRounded && !last) {
      if constexpr (kHigh) {
        if (any) high.add_to(c, some, panel.blocks * kBlockRows);
      }
      continue;
    }
    Folding folding = folding_of<Product, kFold>(args, w, w.row0 + i, some, c);
    if constexpr (kHigh) folding.high = any ? &high : nullptr;
    if constexpr (kFold == Fold::kRounded) add_far_rows(args.acts, w, i, some, c);
    if constexpr (kFold == Fold::kFloat)
      fold_f32(folding);
    else if (any)
      fold_s8<true>(folding);
    else
      fold_s8<false>(folding);
  }
}

// Where the walk is.
struct Walk {
  int k_block, group;  // columns of a K block, row blocks of a group
  int b0 = 0, nb = 0;  // the group
  int row0 = 0, k0 = 0, k1 = 0;
  int b = 0, blocks = 0;  // the panel
};

// The weights after a panel, to be fetched beside it; none when this pass over the rows is not the one that
// reads them.
KT_INLINE void fetch_next(const MultiplyArgs& args, const Walk& at, PanelWork& w) {
  const Packing& p = *args.packing;
  const auto block_bytes = static_cast<int64_t>(p.block_bytes);
  // Bytes of a row block before column k, roughly: what is fetched ahead need not be exact.
  const auto piece = [&](int k) { return block_bytes * (k < p.k_pad ? k : p.k_pad) / p.k_pad / 64 * 64; };
  int next_k = at.k0, next_b = at.b0 + at.b + at.blocks;
  const bool end = at.b + at.blocks >= at.nb;
  if (end) {
    next_b = at.k1 == p.k_pad ? at.b0 + at.group : at.b0;
    next_k = at.k1 == p.k_pad ? 0 : at.k1;
  }
  const bool again = at.row0 + kManyRows < args.m && at.k1 == p.k_pad && end;
  w.next_bytes = piece(next_k + at.k_block) - piece(next_k);
  w.next_stride = block_bytes;
  if (again || (at.row0 > 0 && next_k > 0)) return;
  const int left = args.count - next_b;
  w.next = left > 0 ? reinterpret_cast<const uint8_t*>(args.blocks) + next_b * block_bytes + piece(next_k)
                    : reinterpret_cast<const uint8_t*>(args.after);
  w.next_blocks = panel_width(left > 0 ? left : args.count);
}

// The panel of a step of the walk: as the codes lie, widened, or begun as a ring.
template <class Product, class Chunks, class Widen>
KT_INLINE void prepare(const MultiplyArgs& args, const Walk& at, bool direct, uint8_t* memory, float* scales,
                       Widen&& widen, PanelWork& w) {
  const Packing& p = *args.packing;
  const auto block_bytes = static_cast<int64_t>(p.block_bytes);
  const auto* from = reinterpret_cast<const uint8_t*>(args.blocks) + (at.b0 + at.b) * block_bytes;
  w.panel = {.at = memory,
             .stride = static_cast<int64_t>(at.k1 - at.k0) * kBlockRows * Product::kCodeBytes,
             .blocks = at.blocks};
  if (direct) {
    w.panel.at = from + p.header_bytes + static_cast<int64_t>(at.k0) * kBlockRows * Product::kCodeBytes;
    w.panel.stride = block_bytes;
  } else if constexpr (Chunks::kBeside) {
    w.codes = from + p.header_bytes + static_cast<int64_t>(at.k0 / kChunk) * Chunks::kBytes;
    w.code_stride = block_bytes;
    w.ring = memory;
    w.again = w.rows <= kRingRows;
    if (w.again) {
      w.panel.stride = kRing * kStepBytes;
      w.panel.mask = kRing * kStepBytes - 1;
    }
    const int steps = (at.k1 - at.k0) / kChunk;
    for (int s = -kChunksAhead; s < 0; ++s) widen_ahead<Chunks>(w, w.panel, s, steps);
  } else {
    for (int i = 0; i < at.blocks; ++i)
      widen(from + i * block_bytes, at.k0, at.k1, memory + i * w.panel.stride, scales + i * kBlockRows,
            {w.fine.at + i * w.panel.stride, w.fine.chunks});
  }
}

// The walk. widen(block, k0, k1, panel, scales, fine) fills the panel of a row block; row_scales(block, scales)
// gives the scales that hold for whole rows.
template <class Product, bool kSmall, Fold kFold, class Chunks, class Widen, class RowScales>
KT_INLINE void many(const MultiplyArgs& args, int k_block, bool direct, Widen&& widen,
                    RowScales&& row_scales) {
  const Packing& p = *args.packing;
  auto* memory = reinterpret_cast<uint8_t*>(args.scratch);
  uint8_t* fine = memory + kPanelBytes;  // kRounded with far codes: as large as the panel
  auto* scales = reinterpret_cast<float*>(args.acts.shape.by_row ? fine + kPanelBytes : fine);
  auto* sums = reinterpret_cast<std::byte*>(scales + kPanelRows);
  const bool wait = kFold != Fold::kRounded && k_block < p.k_pad;  // sums, between K blocks
  Walk at{.k_block = k_block, .group = Isa::kTileUnit && !wait ? args.count : Isa::kPanelBlocks};
  if constexpr (Isa::kTileUnit) Late<Isa, Product::kCodeBytes>::type::begin_tiles();
  for (at.b0 = 0; at.b0 < args.count; at.b0 += at.group) {
    at.nb = args.count - at.b0 < at.group ? args.count - at.b0 : at.group;
    for (at.row0 = 0; at.row0 < args.m; at.row0 += kManyRows) {
      const int left = args.acts.shape.rows - at.row0, rows = left < kManyRows ? left : kManyRows;
      for (at.k0 = 0; at.k0 < p.k_pad; at.k0 += k_block) {
        at.k1 = p.k_pad - at.k0 < k_block ? p.k_pad : at.k0 + k_block;
        std::byte* c = sums;
        const uint64_t chunks = kFold == Fold::kRounded ? fine_chunks(args.acts, at.row0, rows, at.k0) : 0;
        for (at.b = 0; at.b < at.nb; at.b += at.blocks) {
          at.blocks = panel_width(at.nb - at.b);
          PanelWork w{.panel = {},
                      .block = reinterpret_cast<const uint8_t*>(args.blocks) +
                               (at.b0 + at.b) * static_cast<int64_t>(p.block_bytes),
                      .k0 = at.k0,
                      .k1 = at.k1,
                      .row0 = at.row0,
                      .rows = rows,
                      .scales = scales,
                      .sums = c,
                      .out = args.out + (at.b0 + at.b) * kBlockRows,
                      .fine = {fine, chunks}};
          prepare<Product, Chunks>(args, at, direct, memory, scales, widen, w);
          if (at.k1 == p.k_pad)
            for (int i = 0; i < at.blocks; ++i)
              row_scales(w.block + i * static_cast<int64_t>(p.block_bytes), scales + i * kBlockRows);
          if constexpr (Isa::kTileUnit) fetch_next(args, at, w);
          if constexpr (kFold == Fold::kSpans)
            Product::multiply(args, w);
          else
            multiply_panel<Product, kSmall, kFold, Chunks>(args, w);
          if (wait) c += int64_t{rows} * kPanelRows * 4;
        }
      }
    }
  }
  if constexpr (Isa::kTileUnit) Late<Isa, Product::kCodeBytes>::type::end_tiles();
}

template <Layout kL>
void many_s8(const MultiplyArgs& args) noexcept {
  const Packing& p = *args.packing;
  if (kL.span == SpanLength::kLong && kL.min == Min::kNone && p.span == p.k_pad) {
    many<ProductS8, small_codes(kL.code), Fold::kExact, Chunks<kL>>(
        args, k_block_of<ProductS8>(p.k_pad, kExactK), kL.code == Code::kI8,
        [&](const uint8_t* block, int k0, int k1, uint8_t* panel, float*, const Fine&) {
          widen_exact<kL>(p, block, k0, k1, panel);
        },
        [&](const uint8_t* block, float* scales) {
          const SpanFactors<kL> f(block, 1);
          for (int i = 0; i < kParts; ++i) Isa::store(scales + i * Isa::kLanes, f.scale(0, i * Isa::kLanes));
        });
    return;
  }
  many<ProductS8, false, Fold::kRounded, NoChunks>(
      args, args.acts.shape.sum_span, false,
      [&](const uint8_t* block, int k0, int k1, uint8_t* panel, float* scales, const Fine& fine) {
        for (int i = 0; i < kParts; ++i)
          widen_rounded<kL>(p, block, k0, k1, i, panel, scales + i * Isa::kLanes, fine);
      },
      [](const uint8_t*, float*) {});
}

template <Layout kL>
void many_bf16(const MultiplyArgs& args) noexcept {
  if constexpr (Isa::kBf16Product)
    many<ProductBf16, false, Fold::kFloat, NoChunks>(
        args, k_block_of<ProductBf16>(args.packing->k_pad, kFloatK), kL.code == Code::kBf16,
        [&](const uint8_t* block, int k0, int k1, uint8_t* panel, float*, const Fine&) {
          widen_bf16<kL>(*args.packing, block, k0, k1, panel);
        },
        [](const uint8_t*, float*) {});
}

template <Layout kL>
void many_f32(const MultiplyArgs& args) noexcept {
  many<ProductF32, false, Fold::kFloat, NoChunks>(
      args, kFloatK, kL.code == Code::kF32,
      [&](const uint8_t* block, int k0, int k1, uint8_t* panel, float*, const Fine&) {
        widen_f32<kL>(*args.packing, block, k0, k1, reinterpret_cast<float*>(panel));
      },
      [](const uint8_t*, float*) {});
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
