// What one call of a tile loop works on, and the sums of far codes (table.h) beside it.
#pragma once
#include "kernels/panel.inl.h"
#include "kernels/products.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

// The order of packed activations here: a tile unit takes whole tiles of 16 rows x 64 bytes, which then lie
// in one piece (rows a power of two apart would fall into the same few sets of L1).
inline constexpr int kManySide = Isa::kTileUnit ? 16 : Isa::kActRows;
inline constexpr int kManyStepBytes = Isa::kTileUnit ? 64 : Isa::kStep;
template <class Product>
constexpr int act_side() {
  return Product::kCodeBytes == 4 ? 1 : kManySide;
}

inline constexpr int kPanelWidth = Isa::kTileUnit ? 3 : 2;                // row blocks of a panel
inline constexpr int kPanelRows = kPanelWidth * kBlockRows;               // and its output columns
inline constexpr int kRowsAtOnce = Isa::kTileUnit ? 32 : Isa::kTileRows;  // token rows of one tile loop

inline constexpr int kStepBytes = kBlockRows * 64;  // of a row block's panel, of one step

// One panel by the columns [k0, k1).
struct PanelWork {
  Panel panel;
  const uint8_t* block;  // the first of its row blocks, packed
  int k0, k1;
  int row0, rows;
  const float* scales;  // [kPanelRows]: of the rows, or of the rounded panel
  std::byte* sums;      // C: [rows, kPanelRows]; one tile where all of K is at hand or it is kRounded
  float* out;           // of row 0
  // what is read next, to be fetched meanwhile: next_bytes of each of some row blocks next_stride apart; or
  // null
  const uint8_t* next = nullptr;
  int64_t next_bytes = 0, next_stride = 0;
  int next_blocks = 0;
  const uint8_t* codes = nullptr;  // what is widened beside, at k0
  int64_t code_stride = 0;
  uint8_t* ring = nullptr;
  bool again = false;  // for every tile of rows: the panel is a ring
  Fine fine;           // kRounded: of the panel
};

struct Nothing {};

// The far codes of a row from column k0 on, as far as a K block reaches, listed by row.
struct FarRow {
  const FarCode *begin, *huge, *end;
};
KT_INLINE FarRow far_row(const Acts& acts, int row, int k0) {
  const ActShape& s = acts.shape;
  const FarCodes far = acts.far_of(row);
  const int32_t* at = far.start + 2 * (row % s.side * s.sum_spans() + k0 / s.sum_span);
  return {far.codes + at[0], far.codes + at[1], far.codes + at[2]};
}
// The chunks of a K block whose fractions any of the rows asks for.
KT_INLINE uint64_t fine_chunks(const Acts& acts, int row0, int rows, int k0) {
  uint64_t chunks = 0;
  for (int i = row0; acts.shape.by_row && i < row0 + rows; ++i) {
    const FarRow far = far_row(acts, i, k0);
    for (const FarCode* code = far.huge; code != far.end; ++code)
      chunks |= uint64_t{1} << (code->four - k0 / 4) / (kChunk / 4);
  }
  return chunks;
}

// What far codes listed by row add to a row of sums: 256 * high * byte of a rounded panel, and high * (f - 128) from
// the fractions where high is huge.
template <int kBlocks>
KT_INLINE void add_far_row(const PanelWork& w, const FarRow& far, int32_t* to) {
  constexpr int kFours = Isa::kStep / 4;
  using I = typename Late<Isa, kBlocks>::type;
  typename I::Acc sums[kBlocks];
  const int first = w.k0 / 4;
  const auto dot = [&](const FarCode* from, const FarCode* end,
                       const uint8_t* panel) __attribute__((always_inline)) {
    unroll<kBlocks>([&](auto b) __attribute__((always_inline)) { sums[b] = I::zero_acc(); });
    for (const FarCode* code = from; code != end; ++code) {
      const uint64_t four = uint64_t{code->high} << (code->four % kFours * 32);
      const auto x = I::load_act(reinterpret_cast<const int8_t*>(&four));
      const uint8_t* at = panel + int64_t{code->four - first} / kFours * kPartBytes;
      unroll<kBlocks>([&](auto b) __attribute__((always_inline)) {
        I::template dot<false>(sums[b], I::load_bytes(at + b * w.panel.stride), x);
      });
    }
  };
  dot(far.begin, far.end, w.panel.at);
  unroll<kBlocks>([&](auto b) __attribute__((always_inline)) {
    const auto whole = I::mul(I::template total<0>(sums[b]), I::set1(int32_t{256}));
    I::store(to + b * kBlockRows, I::add(I::load(to + b * kBlockRows), whole));
  });
  if (far.huge == far.end) return;
  dot(far.huge, far.end, w.fine.at);
  int all = 0;
  for (const FarCode* code = far.huge; I::kUnsigned && code != far.end; ++code)
    all += static_cast<int16_t>(code->row);
  unroll<kBlocks>([&](auto b) __attribute__((always_inline)) {
    const auto rest = I::sub(I::template total<0>(sums[b]), I::set1(static_cast<int32_t>(128 * all)));
    I::store(to + b * kBlockRows, I::add(I::load(to + b * kBlockRows), rest));
  });
}
// To the sums c of `rows` rows of the work from row `row` on.
KT_INLINE void add_far_rows(const Acts& acts, const PanelWork& w, int row, int rows, int32_t* c) {
  for (int i = 0; acts.shape.by_row && i < rows; ++i, c += kPanelRows) {
    const FarRow far = far_row(acts, w.row0 + row + i, w.k0);
    if (far.begin == far.end) continue;
    if (w.panel.blocks == 3)
      add_far_row<3>(w, far, c);
    else if (w.panel.blocks == 2)
      add_far_row<2>(w, far, c);
    else
      add_far_row<1>(w, far, c);
  }
}

// Sums of the far codes' high bytes (table.h), chunk by chunk beside those of the low ones.
struct HighSums {
  alignas(64) int32_t sum[kRowsAtOnce][kPanelRows];
  // The lists of rows that stand side by side, from the first column of the panel on.
  const int32_t* start[kRowsAtOnce / kManySide];
  const FarCode* codes[kRowsAtOnce / kManySide];

  // For `rows` rows of the work from row `row` on; false: none of them has far codes here.
  KT_INLINE bool begin(const Acts& acts, const PanelWork& w, int row, int rows) {
    bool any = false;
    for (int g = 0; acts.far && g < rows / kManySide; ++g) {
      const FarCodes far = acts.far_of(w.row0 + row + g * kManySide);
      start[g] = far.start + w.k0 / kChunk;
      codes[g] = far.codes;
      any |= start[g][(w.k1 - w.k0) / kChunk] != start[g][0];
    }
    if (any) __builtin_memset(sum, 0, static_cast<size_t>(rows) * sizeof(sum[0]));
    return any;
  }

  // Step s of the panel, for group `group` of the rows.
  template <bool kSmall>
  KT_INLINE void add(const Panel& panel, int s, int group) {
    using I = typename Late<Isa, kSmall>::type;
    const uint8_t* from = panel.at + ((panel.phase + int64_t{s} * kStepBytes) & panel.mask);
    for (int i = start[group][s]; i < start[group][s + 1]; ++i) {
      const FarCode& code = codes[group][i];
      constexpr int kFours = Isa::kStep / 4;  // of a step
      const uint64_t bytes = uint64_t{code.high} << (code.four % kFours * 32);
      const auto x = Isa::load_act(reinterpret_cast<const int8_t*>(&bytes));
      const uint8_t* w = from + code.four / kFours * kPartBytes;
      int32_t* to = sum[group * kManySide + code.row];
      unroll<kPanelWidth>([&](auto b) __attribute__((always_inline)) {
        if (b >= panel.blocks) return;
        auto acc = I::acc_of(I::load(to + b * kBlockRows));
        I::template dot<kSmall>(acc, I::load_bytes(w + b * panel.stride), x);
        I::store(to + b * kBlockRows, I::template total<0>(acc));
      });
    }
  }

  KT_INLINE typename Isa::I32 at(int row, int column) const {
    return Isa::mul(Isa::load(sum[row] + column), Isa::set1(int32_t{256}));
  }
  // To sums that wait until all of K is there.
  KT_INLINE void add_to(int32_t* c, int rows, int columns) const {
    for (int i = 0; i < rows; ++i, c += kPanelRows)
      for (int j = 0; j < columns; j += Isa::kLanes) Isa::store(c + j, Isa::add(Isa::load(c + j), at(i, j)));
  }
};

}  // namespace
}  // namespace KT_ISA_NAMESPACE
