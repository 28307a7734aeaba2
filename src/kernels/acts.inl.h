// Rows of activations in the order the kernels read them (table.h, Acts): quantised from the source, or copied from
// rows that are.
#pragma once
#include "kernels/many.inl.h"
#include "kernels/math.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

inline constexpr int kUnit = kBlockRows;  // columns handled together: kParts vectors

// Columns [column, column + 16) of a source row.
struct Unit {
  F32 v[kParts];
};
template <Real kType>
KT_INLINE Unit load_unit(const uint8_t* row, int column) {
  constexpr int kSize = kType == Real::kF32 ? 4 : 2;
  const uint8_t* at = row + static_cast<int64_t>(column) * kSize;
  Unit u;
  unroll<kParts>([&](auto i) __attribute__((always_inline)) {
    const uint8_t* from = at + i * Isa::kLanes * kSize;
    if constexpr (kType == Real::kF32)
      u.v[i] = Isa::load(reinterpret_cast<const float*>(from));
    else if constexpr (kType == Real::kBf16)
      u.v[i] = Isa::load_bf16(from);
    else
      u.v[i] = Isa::load_f16(from);
  });
  return u;
}
// The same where the row ends at k: zeros from there on.
template <Real kType>
KT_INLINE Unit load_last_unit(const uint8_t* row, int column, int k) {
  constexpr int kSize = kType == Real::kF32 ? 4 : 2;
  alignas(64) uint8_t tail[kUnit * 4] = {};
  if (column < k)
    __builtin_memcpy(tail, row + static_cast<int64_t>(column) * kSize,
                     static_cast<size_t>(k - column) * kSize);
  return load_unit<kType>(tail, 0);
}

// Writes 16 codes of one row, given in column order, to their places (table.h, Acts).
template <int kSize>
KT_INLINE void place(const Acts& out, uint8_t* group, int in_group, int column, const uint8_t* from) {
  const int side = out.shape.side, byte = column * kSize;
  if (side == 1) {
    __builtin_memcpy(group + byte, from, kUnit * kSize);
  } else if (out.shape.step_bytes == 64) {
    __builtin_memcpy(group + byte / 64 * 64 * side + in_group * 64 + byte % 64, from, kUnit * kSize);
  } else {
    uint8_t* to = group + byte * side + in_group * Isa::kStep;
    for (int b = 0; b < kUnit * kSize; b += Isa::kStep) __builtin_memcpy(to + b * side, from + b, Isa::kStep);
  }
}

// Columns [begin, end) of a row.
struct Stretch {
  int begin, end;
};

// d = amax * (1/127), code = round half even (x * (1/d)); a span of zeros has d = 0.
template <Real kType>
KT_INLINE void pack_row_s8(const Acts& out, int row, const uint8_t* source, int k, const Stretch& some) {
  const ActShape& s = out.shape;
  const int step = s.scale_step(row);
  float* scales = out.scales + s.scale_at(row, s.scale_spans());
  int64_t sum_at = s.scale_at(row, s.sum_spans()) + int64_t{some.begin / s.sum_span} * step;
  auto* group = reinterpret_cast<uint8_t*>(out.codes) + static_cast<int64_t>(row / s.side * s.side) * s.k_pad;
  const int whole = k / kUnit * kUnit;  // columns in full units
  I32 sum = Isa::set1(int32_t{0});
  float value = 0;  // of sums that were scaled already
  int sum_end = s.k_pad - some.begin < s.sum_span ? s.k_pad : some.begin + s.sum_span;
  for (int from = some.begin, span = from / s.scale_span; from < some.end; from += s.scale_span, ++span) {
    const int to = s.k_pad - from < s.scale_span ? s.k_pad : from + s.scale_span;
    F32 top[2] = {Isa::set1(0.0f), Isa::set1(0.0f)};
    const auto raise = [&](const Unit& u) __attribute__((always_inline)) {
      unroll<kParts>([&](auto i) __attribute__((always_inline)) {
        top[i % 2] = Isa::max(top[i % 2], Isa::abs(u.v[i]));
      });
    };
    int c = from;
    for (; c < to && c < whole; c += kUnit) raise(load_unit<kType>(source, c));
    if (c < to && c < k) raise(load_last_unit<kType>(source, c, k));
    const float d = Isa::max_of(Isa::max(top[0], top[1])) * (1.0f / 127);
    const F32 inverse = Isa::set1(d > 0x1p-120f ? 1.0f / d : 0.0f);
    scales[span * step] = d > 0x1p-120f ? d : 0.0f;
    for (c = from; c < to; c += kUnit) {
      const Unit u = c < whole ? load_unit<kType>(source, c) : load_last_unit<kType>(source, c, k);
      alignas(16) int8_t codes[kUnit];
      unroll<kParts>([&](auto i) __attribute__((always_inline)) {
        const I32 q = Isa::round(Isa::mul(u.v[i], inverse));
        sum = Isa::add(sum, q);
        Isa::store_s8(codes + i * Isa::kLanes, q);
      });
      place<1>(out, group, row % s.side, c, reinterpret_cast<const uint8_t*>(codes));
      const bool ends = c + kUnit == sum_end;
      if (s.sums == SumKind::kValues && (ends || c + kUnit == to)) {
        value += scales[span * step] * static_cast<float>(Isa::sum_of(sum));
        sum = Isa::set1(int32_t{0});
      }
      if (ends) {
        if (s.sums == SumKind::kValues)
          out.values[sum_at] = value;
        else
          out.sums[sum_at] = s.sum_factor * Isa::sum_of(sum);
        sum_at += step;
        sum = Isa::set1(int32_t{0});
        value = 0;
        sum_end = s.k_pad - sum_end < s.sum_span ? s.k_pad : sum_end + s.sum_span;
      }
    }
  }
}

// 16 codes of one row: their low bytes to their places; put(column, high) for each high byte that is not zero. Numbers
// that are not finite have codes beyond any high byte, and more of them than a list has room for.
template <Real kType, class Put>
KT_INLINE void put_codes(const Acts& out, uint8_t* group, int in_group, int column, I32 q, Put&& put) {
  alignas(16) int8_t low[kUnit];
  Isa::store_s8(low, q);
  uint32_t beyond = Late<Isa, kType>::type::beyond_s8(q);
  place<1>(out, group, in_group, column, reinterpret_cast<const uint8_t*>(low));
  if (!beyond) return;
  alignas(64) int32_t codes[kUnit];
  Isa::store(codes, q);
  for (; beyond; beyond &= beyond - 1) {
    const int at = __builtin_ctz(beyond);
    put(column + at, static_cast<int8_t>((codes[at] - low[at]) >> 8));
  }
}
KT_INLINE uint32_t high_byte(int column, int high) {
  return static_cast<uint32_t>(high & 255) << (column % 4 * 8);
}

// The scale of a row with far codes (table.h). Sizes are added by lane, lanes in order: the same bits everywhere.
template <Real kType>
KT_INLINE float far_scale(const uint8_t* source, int k, float times) {
  static_assert(Late<Isa, kType>::type::kLanes == kUnit);
  F32 top = Isa::set1(0.0f), sum = top;
  for (int c = 0; c < k; c += kUnit) {
    const Unit u = c + kUnit <= k ? load_unit<kType>(source, c) : load_last_unit<kType>(source, c, k);
    const F32 size = Isa::abs(u.v[0]);
    top = Isa::max(top, size);
    sum = Isa::add(sum, size);
  }
  alignas(64) float lanes[Isa::kLanes];
  Isa::store(lanes, sum);
  float near = 0;
  for (const float lane : lanes) near += lane;
  near *= times / static_cast<float>(k > 0 ? k : 1);
  const float largest = Isa::max_of(top);
  const float d = (near < largest ? near : largest) * (1.0f / 127), least = largest * (1.0f / kFarthest);
  return d < least ? least : d;
}

// `side` rows from row `row` on, column by column, so that the list of their far codes is in order.
template <Real kType>
__attribute__((noinline)) void pack_far_rows(const PackActsArgs& args, int row) {
  const ActShape& s = args.out.shape;
  constexpr int kMostSide = 16;
  const uint8_t* source[kMostSide];
  int k[kMostSide];
  F32 inverse[kMostSide];
  I32 sum[kMostSide];
  for (int i = 0; i < s.side; ++i) {
    const bool real = row + i < args.m;
    const int64_t from = !real ? 0 : args.index ? args.index[row + i] : row + i;
    source[i] = static_cast<const uint8_t*>(args.source) + from * args.stride * (kType == Real::kF32 ? 4 : 2);
    k[i] = real ? args.k : 0;
    const float d = far_scale<kType>(source[i], k[i], s.near());
    inverse[i] = Isa::set1(d > 0x1p-120f ? 1.0f / d : 0.0f);
    args.out.scales[row + i] = d > 0x1p-120f ? d : 0.0f;
    sum[i] = Isa::set1(int32_t{0});
  }
  auto* group = reinterpret_cast<uint8_t*>(args.out.codes) + static_cast<int64_t>(row) * s.k_pad;
  const FarCodes far = args.out.far_of(row);
  int count = 0;
  for (int chunk = 0; chunk < s.k_pad; chunk += kChunk) {
    far.start[chunk / kChunk] = count;
    for (int i = 0; i < s.side; ++i)
      for (int c = chunk; c < chunk + kChunk; c += kUnit) {
        const Unit u =
            c + kUnit <= k[i] ? load_unit<kType>(source[i], c) : load_last_unit<kType>(source[i], c, k[i]);
        const I32 q = Isa::round(Isa::mul(u.v[0], inverse[i]));
        sum[i] = Isa::add(sum[i], q);
        put_codes<kType>(args.out, group, i, c, q, [&](int column, int high) __attribute__((always_inline)) {
          if (count == s.far_most()) return;
          far.codes[count++] = {.row = static_cast<uint16_t>(i),
                                .four = static_cast<uint16_t>(column % kChunk / 4),
                                .high = high_byte(column, high)};
        });
      }
  }
  far.start[s.k_pad / kChunk] = count;
  for (int i = 0; i < s.side; ++i) args.out.sums[row + i] = Isa::sum_of(sum[i]);
}

// A row's list by row: span after span, the huge codes of one after its others.
struct RowList {
  FarCodes far;
  int most, count = 0, at = 0, huge = 0;  // the huge ones wait behind `most`

  KT_INLINE void begin_span() { far.start[at++] = count; }
  KT_INLINE void put(int column, int high) {
    if (count + huge == most) return;
    const FarCode code{.row = static_cast<uint16_t>(high),
                       .four = static_cast<uint16_t>(column / 4),
                       .high = high_byte(column, high)};
    far.codes[high >= kHuge || high <= -kHuge ? most + huge++ : count++] = code;
  }
  KT_INLINE void end_span() {
    far.start[at++] = count;
    __builtin_memcpy(far.codes + count, far.codes + most, static_cast<size_t>(huge) * sizeof(FarCode));
    count += huge;
    huge = 0;
  }
};

// The same row after row, for lists by row.
template <Real kType>
__attribute__((noinline)) void pack_far_by_row(const PackActsArgs& args, int row) {
  const ActShape& s = args.out.shape;
  auto* group = reinterpret_cast<uint8_t*>(args.out.codes) + static_cast<int64_t>(row) * s.k_pad;
  RowList list{.far = args.out.far_of(row), .most = s.far_most()};
  int32_t* sums = args.out.sums + int64_t{row} * s.sum_spans();
  for (int i = 0; i < s.side; ++i) {
    const bool real = row + i < args.m;
    const int64_t from = !real ? 0 : args.index ? args.index[row + i] : row + i;
    const uint8_t* source =
        static_cast<const uint8_t*>(args.source) + from * args.stride * (kType == Real::kF32 ? 4 : 2);
    const int k = real ? args.k : 0;
    const float d = far_scale<kType>(source, k, s.near());
    const F32 inverse = Isa::set1(d > 0x1p-120f ? 1.0f / d : 0.0f);
    args.out.scales[row + i] = d > 0x1p-120f ? d : 0.0f;
    for (int begin = 0; begin < s.k_pad; begin += s.sum_span) {
      const int end = s.k_pad - begin < s.sum_span ? s.k_pad : begin + s.sum_span;
      list.begin_span();
      I32 sum = Isa::set1(int32_t{0});
      for (int c = begin; c < end; c += kUnit) {
        const Unit u = c + kUnit <= k ? load_unit<kType>(source, c) : load_last_unit<kType>(source, c, k);
        const I32 q = Isa::round(Isa::mul(u.v[0], inverse));
        sum = Isa::add(sum, q);
        put_codes<kType>(args.out, group, i, c, q, [&](int column, int high) __attribute__((always_inline)) {
          list.put(column, high);
        });
      }
      *sums++ = Isa::sum_of(sum);
      list.end_span();
    }
  }
  list.begin_span();
}

template <Real kType>
KT_INLINE void pack_row_float(const Acts& out, int row, const uint8_t* source, int k, const Stretch& some) {
  const ActShape& s = out.shape;
  const int whole = k / kUnit * kUnit;
  auto* group =
      reinterpret_cast<uint8_t*>(out.codes) + static_cast<int64_t>(row / s.side * s.side) * s.k_pad * 2;
  for (int c = some.begin; c < some.end; c += kUnit) {
    const Unit u = c < whole ? load_unit<kType>(source, c) : load_last_unit<kType>(source, c, k);
    if (s.code == ActCode::kF32) {
      float* to = reinterpret_cast<float*>(out.codes) + static_cast<int64_t>(row) * s.k_pad + c;
      for (int i = 0; i < kParts; ++i) Isa::store(to + i * Isa::kLanes, u.v[i]);
    } else {
      alignas(32) uint8_t codes[kUnit * 2];
      for (int i = 0; i < kParts; ++i) Isa::store_bf16(codes + i * Isa::kLanes * 2, u.v[i]);
      place<2>(out, group, row % s.side, c, codes);
    }
  }
}

template <Real kType>
__attribute__((noinline)) void pack_rows(const PackActsArgs& args) {
  constexpr int kSize = kType == Real::kF32 ? 4 : 2;
  if constexpr (Late<Isa, kType>::type::kRoundedPanels) {
    const ActShape& s = args.out.shape;
    for (int i = 0; s.far && i < s.rows; i += s.side)
      s.by_row ? pack_far_by_row<kType>(args, i) : pack_far_rows<kType>(args, i);
    if (s.far) return;
  }
  const Stretch some{args.first, args.last < 0 ? args.out.shape.k_pad : args.last};
  for (int i = 0; i < args.out.shape.rows; ++i) {
    const int64_t row = i >= args.m ? 0 : args.index ? args.index[i] : i;
    const uint8_t* source = static_cast<const uint8_t*>(args.source) + row * args.stride * kSize;
    const int k = i < args.m ? args.k : 0;  // padding rows are rows without columns
    if (args.out.shape.code == ActCode::kS8)
      pack_row_s8<kType>(args.out, i, source, k, some);
    else
      pack_row_float<kType>(args.out, i, source, k, some);
  }
}

void pack_acts(const PackActsArgs& args) noexcept {
  switch (args.type) {
    case Real::kF32:
      return pack_rows<Real::kF32>(args);
    case Real::kBf16:
      return pack_rows<Real::kBf16>(args);
    case Real::kF16:
      return pack_rows<Real::kF16>(args);
  }
}

// The far codes of `side` rows from row `row` on, one list of the lists of single rows.
KT_INLINE void copy_far(const CopyActsArgs& args, int row) {
  const ActShape& s = args.out.shape;
  const FarCodes to = args.out.far_of(row);
  int count = 0;
  if (s.by_row) {
    const int starts = 2 * s.sum_spans();
    for (int i = 0; i < s.side; ++i) {
      const bool real = row + i < args.m;
      const FarCodes from = args.from.far_of(real ? args.index[row + i] : 0);
      for (int j = 0; j < starts; ++j) to.start[i * starts + j] = count + (real ? from.start[j] : 0);
      const int more = real ? from.start[starts] : 0;
      for (int j = 0; j < more; ++j) to.codes[count + j] = from.codes[j];
      count += more;
    }
    to.start[s.side * starts] = count;
    return;
  }
  for (int chunk = 0; chunk < s.k_pad / kChunk; ++chunk) {
    to.start[chunk] = count;
    for (int i = 0; i < s.side && row + i < args.m; ++i) {
      const FarCodes from = args.from.far_of(args.index[row + i]);
      for (int j = from.start[chunk]; j < from.start[chunk + 1]; ++j) {
        to.codes[count] = from.codes[j];
        to.codes[count++].row = static_cast<uint16_t>(i);
      }
    }
  }
  to.start[s.k_pad / kChunk] = count;
}

void copy_acts(const CopyActsArgs& args) noexcept {
  const ActShape& s = args.out.shape;
  for (int i = 0; i < s.rows; ++i) {
    const bool real = i < args.m;
    const int64_t row = real ? args.index[i] : 0;
    auto* to = reinterpret_cast<uint8_t*>(args.out.codes) +
               static_cast<int64_t>(i / s.side * s.side) * s.k_pad + i % s.side * s.step_bytes;
    const auto* from = reinterpret_cast<const uint8_t*>(args.from.codes) + row * s.k_pad;
    const auto move = [&](auto piece) __attribute__((always_inline)) {
      constexpr int kPiece = decltype(piece)::value;
      alignas(64) const uint8_t zeros[kPiece] = {};
      for (int b = 0; b < s.k_pad; b += kPiece)
        __builtin_memcpy(to + static_cast<int64_t>(b) * s.side, real ? from + b : zeros, kPiece);
    };
    if (s.side == 1 || s.step_bytes == 64)
      move(Int<64>{});
    else
      move(Int<Isa::kStep>{});
    const int step = s.scale_step(i);
    float* scales = args.out.scales + s.scale_at(i, s.scale_spans());
    for (int j = 0; j < s.scale_spans(); ++j)
      scales[j * step] = real ? args.from.scales[row * s.scale_spans() + j] : 0.0f;
    const int64_t sums = s.scale_at(i, s.sum_spans());
    if (s.sums == SumKind::kCodes)
      for (int j = 0; j < s.sum_spans(); ++j)
        args.out.sums[sums + j * step] = real ? args.from.sums[row * s.sum_spans() + j] : 0;
    else
      for (int j = 0; j < s.sum_spans(); ++j)
        args.out.values[sums + j * step] = real ? args.from.values[row * s.sum_spans() + j] : 0.0f;
    if (s.far && i % s.side == 0) copy_far(args, i);
  }
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
