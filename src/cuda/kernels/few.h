// A warp's share of products of few rows: pieces of columns, copied ahead of their turn and multiplied as operands.h
// says.
#pragma once
#include "cuda/kernels/operands.h"

namespace kt::inline cuda {

constexpr int kFewWarps = kFewThreads / gpu::kWarp;
constexpr int kFewMemory = 48 << 10;  // of a block, so that two and the cache of x fit
constexpr int kMostStages = 6;

template <Code kCode, int kBlocks>
constexpr int kStageWords = PieceUnits<kCode>::kAll * kBlocks;
template <Code kCode, int kBlocks>
constexpr int kStages = kFewMemory / kFewWarps / 16 / kStageWords<kCode, kBlocks> < kMostStages
                            ? kFewMemory / kFewWarps / 16 / kStageWords<kCode, kBlocks>
                            : kMostStages;
template <Code kCode, int kBlocks>
constexpr int kWarpWords = kStages<kCode, kBlocks> * kStageWords<kCode, kBlocks>;

// The lane's rows of x, one of each group, from its first column on.
template <Code kCode, int kStep, int kGroups>
struct FewInput {
  const float* x[kGroups];
  bool live[kGroups];
  bool aligned;
  int k;  // columns from there on

  // `rows` rows of so many columns; of some of several matrices' that stand `apart`.
  KT_GPU FewInput(const float* from, int64_t stride, int rows, int columns, int64_t apart = 0) {
    const int row = static_cast<int>(lane_of() / 4),
              column = static_cast<int>(first_column<kCode, kStep>(0, lane_of() % 4));
    k = columns - column;
    for (int g = 0; g < kGroups; ++g) {
      live[g] = row + g * 8 < rows;
      x[g] = from + (row + g * 8) * stride + column;
    }
    aligned = (reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>((stride | apart) * 4)) % 16 == 0;
  }
  // The lane's columns of a span of the piece from column `first` on, as they lie: on their way while the span before
  // is multiplied.
  KT_GPU void load(int64_t further, int first, int span,
                   FourNumbers (&to)[kGroups][kSpanParts<kCode>]) const {
    constexpr int kParts = kSpanParts<kCode>;
    const auto column = [&](int t) {
      return static_cast<int>(first_column<kCode, kStep>(span * kParts + t, 0));
    };
    const bool whole = aligned && first + column(kParts - 1) + 4 <= k;
    for (int g = 0; g < kGroups; ++g)
      for (int t = 0; t < kParts; ++t) to[g][t] = {};
    for (int g = 0; g < kGroups; ++g) {
      if (!live[g]) continue;
      const float* const from = x[g] + further + first;
      if (whole)
        for (int t = 0; t < kParts; ++t) to[g][t] = numbers_at(from, column(t), 0, true);
      else
        for (int t = 0; t < kParts; ++t) to[g][t] = numbers_at(from, column(t), k - first, false);
    }
  }
};

// Which pieces a warp takes: every `step`th of one matrix. Other walks (experts_few.cu) go through several, whose
// weights and rows of x stand further on.
struct OneMatrix {
  int piece, pieces, step;

  KT_GPU bool there() const { return piece < pieces; }
  KT_GPU void next() { piece += step; }
  KT_GPU int64_t weights_further() const { return 0; }
  KT_GPU int64_t x_further() const { return 0; }
  KT_GPU float times() const { return 1; }
};

template <Code kCode>
KT_GPU int few_pieces(int k) {
  return (k + kPieceColumns<kCode> - 1) / kPieceColumns<kCode>;
}

// A NaN among the codes of a row is the row's, for all lanes that have columns of it.
template <int kBlocks, int kGroups>
KT_GPU void spread_nans(uint32_t (&nans)[kBlocks][2], float (&sums)[kBlocks][kGroups][4]) {
  for (int b = 0; b < kBlocks; ++b) {
    for (int r = 0; r < 2; ++r) {
      float found = nans[b][r] ? 1.0f : 0.0f;
      for (int mask = 1; mask < 4; mask *= 2) found += gpu::shuffle_xor(found, mask);
      if (found > 0)
        for (int g = 0; g < kGroups; ++g)
          for (int s = 0; s < 2; ++s) sums[b][g][r * 2 + s] = gpu::float_of(0x7FC00000u);
    }
  }
}

// sums[block][group] += the walk's pieces, of x times walk.times(): rows 2 i and 2 i + 1 of row blocks, rows 2 j and 2
// j + 1 of x.
template <Code kCode, int kStep, int kBlocks, int kGroups, typename Walk>
KT_GPU void sum_pieces(const PackedRows& w, const PieceCopies<kCode, kBlocks>& copies,
                       const FewInput<kCode, kStep, kGroups>& input, const Walk& walk, gpu::Words* stages,
                       float (&sums)[kBlocks][kGroups][4]) {
  constexpr int kColumns = kPieceColumns<kCode>, kCount = kStages<kCode, kBlocks>,
                kSpans = kColumns / 16 / kSpanParts<kCode>;
  // As registers allow.
  [[maybe_unused]] constexpr int kUnrolled = kGroups * kBlocks < 4 || kSpans == 1 ? 4 : 1;
  static_assert(kCount >= 2, "a piece is copied while another is multiplied");
  const OperandSpec spec(w, kColumns);
  Walk ahead = walk;
  const auto copy_next = [&](int stage) {
    if (ahead.there())
      copies.copy(ahead.piece, ahead.weights_further(), stages + stage * kStageWords<kCode, kBlocks>);
    gpu::end_copies();
    ahead.next();
  };
  KT_UNROLL(1)
  for (int s = 0; s + 1 < kCount; ++s) copy_next(s);
  Walk at = walk;
  FourNumbers next[kGroups][kSpanParts<kCode>] = {};
  if (at.there()) input.load(at.x_further(), at.piece * kColumns, 0, next);
  uint32_t nans[kBlocks][2] = {};
  int stage = 0;
  KT_UNROLL(1)
  while (at.there()) {
    gpu::await_copies<kCount - 2>();
    gpu::warp_barrier();  // all lanes' copies are there, and the stage before is read
    copy_next(stage == 0 ? kCount - 1 : stage - 1);
    const Walk here = at;
    at.next();
    KT_UNROLL(kUnrolled)
    for (int span = 0; span < kSpans; ++span) {
      gpu::Words2 x[kGroups][kSpanParts<kCode>];
      for (int g = 0; g < kGroups; ++g)
        for (int t = 0; t < kSpanParts<kCode>; ++t) x[g][t] = input_operand<kCode>(next[g][t], here.times());
      if (span + 1 < kSpans)
        input.load(here.x_further(), here.piece * kColumns, span + 1, next);
      else if (at.there())
        input.load(at.x_further(), at.piece * kColumns, 0, next);
      multiply_span<kCode, kStep>(spec, stages + stage * kStageWords<kCode, kBlocks>, span, x, sums, nans);
    }
    stage = stage + 1 == kCount ? 0 : stage + 1;
  }
  if constexpr (kCode == Code::kE4m3) spread_nans(nans, sums);
}

}  // namespace kt::inline cuda
