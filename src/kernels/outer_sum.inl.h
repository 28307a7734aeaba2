// Sums over rows of outer products (transpose.h): gradients of the small matrices of adapters. A tile of sums stays
// in registers while all rows pass; the wide operand is read again for every kOuterRows columns of the narrow one,
// which cost little beside the products of a backward pass: a rank is a hundredth of what those are deep.
#pragma once
#include "kernels/acts.inl.h"
#include "kernels/transpose.h"

namespace KT_ISA_NAMESPACE {
namespace {

inline constexpr int kOuterRows = 4;
// 16 sums, or 8 where there are no more than 16 registers.
inline constexpr int kOuterUnits = Isa::kLanes == 16 && Isa::kTileGroups == 8 ? 4 : 1;

// out[i .. i + m, c .. c + n] += factor * sums [m, kOuterUnits * kUnit].
__attribute__((noinline)) void add_sums(const OuterSumArgs& args, int i, int m, int c, int n, float* sums) {
  const F32 factor = Isa::set1(args.factor);
  for (int j = 0; j < m; ++j)
    for (int u = 0; u < n; u += Isa::kLanes) {
      float* to = args.out + (i + j) * args.out_ld + (c + u) * args.out_step;
      const F32 sum = Isa::load(sums + j * kOuterUnits * kUnit + u);
      const int width = n - u < Isa::kLanes ? n - u : Isa::kLanes;
      if (args.out_step == 1 && width == Isa::kLanes) {
        Isa::store(to, Isa::fma(sum, factor, Isa::load(to)));
        continue;
      }
      alignas(64) float beside[Isa::kLanes] = {};
      for (int r = 0; r < width; ++r) beside[r] = to[r * args.out_step];
      Isa::store(beside, Isa::fma(sum, factor, Isa::load(beside)));
      for (int r = 0; r < width; ++r) to[r * args.out_step] = beside[r];
    }
}

// kM columns of a from column i on by kU units of columns of b from column c on; a single unit may be cut short.
template <Real kType, int kM, int kU>
__attribute__((noinline)) void outer_tile(const OuterSumArgs& args, int i, int c) {
  F32 acc[kM][kU * kParts];
  unroll<kM * kU * kParts>([&](auto at) __attribute__((always_inline)) {
    acc[at / (kU * kParts)][at % (kU * kParts)] = Isa::set1(0.0f);
  });
  const auto* b = static_cast<const uint8_t*>(args.b);
  const int64_t row_bytes = args.b_ld * (kType == Real::kF32 ? 4 : 2);
  const float* a = args.a + i;
  const auto rows = [&](auto&& load) __attribute__((always_inline)) {
    for (int t = 0; t < args.rows; ++t) {
      const uint8_t* row = b + (args.index ? args.index[t] : t) * row_bytes;
      Unit unit[kU];
      unroll<kU>([&](auto u) __attribute__((always_inline)) { unit[u] = load(row, c + u * kUnit); });
      unroll<kM>([&](auto j) __attribute__((always_inline)) {
        const F32 x = Isa::set1(a[t * args.a_ld + j]);
        unroll<kU * kParts>([&](auto p) __attribute__((always_inline)) {
          acc[j][p] = Isa::fma(unit[p / kParts].v[p % kParts], x, acc[j][p]);
        });
      });
    }
  };
  const int left = args.b_columns - c;
  if (kU > 1 || left >= kUnit)
    rows([](const uint8_t* row, int column)
             __attribute__((always_inline)) { return load_unit<kType>(row, column); });
  else
    rows([&](const uint8_t* row, int column)
             __attribute__((always_inline)) { return load_last_unit<kType>(row, column, args.b_columns); });
  alignas(64) float sums[kM * kOuterUnits * kUnit];
  unroll<kM * kU * kParts>([&](auto at) __attribute__((always_inline)) {
    constexpr int kRow = at.value / (kU * kParts), kPart = at.value % (kU * kParts);
    Isa::store(sums + kRow * kOuterUnits * kUnit + kPart * Isa::kLanes, acc[kRow][kPart]);
  });
  add_sums(args, i, kM, c, left < kU * kUnit ? left : kU * kUnit, sums);
}

template <Real kType>
KT_INLINE void outer_columns(const OuterSumArgs& args) {
  const int tiles = args.b_columns / (kOuterUnits * kUnit) * (kOuterUnits * kUnit);
  int i = 0;
  for (; i + kOuterRows <= args.a_columns; i += kOuterRows) {
    for (int c = 0; c < tiles; c += kOuterUnits * kUnit)
      outer_tile<kType, kOuterRows, kOuterUnits>(args, i, c);
    for (int c = tiles; c < args.b_columns; c += kUnit) outer_tile<kType, kOuterRows, 1>(args, i, c);
  }
  for (; i < args.a_columns; ++i)
    for (int c = 0; c < args.b_columns; c += kUnit) outer_tile<kType, 1, 1>(args, i, c);
}

void outer_sum(const OuterSumArgs& args) noexcept {
  switch (args.b_type) {
    case Real::kF32:
      return outer_columns<Real::kF32>(args);
    case Real::kBf16:
      return outer_columns<Real::kBf16>(args);
    case Real::kF16:
      return outer_columns<Real::kF16>(args);
  }
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
