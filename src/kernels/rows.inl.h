// Work on rows of activations: quantising them, the activation between the projections, the weighted sum, and
// the loops that measure this machine's limits.
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

// d = amax * (1/127), code = round half even (x * (1/d)); a span of zeros has d = 0.
template <Real kType>
KT_INLINE void pack_row_s8(const Acts& out, int row, const uint8_t* source, int k) {
  const ActShape& s = out.shape;
  const int step = s.scale_step(row);
  float* scales = out.scales + s.scale_at(row, s.scale_spans());
  int64_t sum_at = s.scale_at(row, s.sum_spans());
  auto* group = reinterpret_cast<uint8_t*>(out.codes) + static_cast<int64_t>(row / s.side * s.side) * s.k_pad;
  const int whole = k / kUnit * kUnit;  // columns in full units
  I32 sum = Isa::set1(int32_t{0});
  float value = 0;  // of sums that were scaled already
  int sum_end = s.sum_span < s.k_pad ? s.sum_span : s.k_pad;
  for (int from = 0, span = 0; from < s.k_pad; from += s.scale_span, ++span) {
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

// 16 codes of one row: their low bytes to their places, their high bytes, if any is not zero, to the list. Numbers
// that are not finite have codes beyond any high byte: the list ends where it is full.
template <Real kType>
KT_INLINE void put_far(const Acts& out, uint8_t* group, int in_group, int column, I32 q, FarCode* list,
                       int& count) {
  alignas(16) int8_t low[kUnit];
  Isa::store_s8(low, q);
  uint32_t beyond = Late<Isa, kType>::type::beyond_s8(q);
  place<1>(out, group, in_group, column, reinterpret_cast<const uint8_t*>(low));
  if (!beyond) return;
  alignas(64) int32_t codes[kUnit];
  Isa::store(codes, q);
  for (; beyond && count < out.shape.far_most(); beyond &= beyond - 1) {
    const int at = __builtin_ctz(beyond), c = column + at;
    list[count++] = {.row = static_cast<uint16_t>(in_group),
                     .four = static_cast<uint16_t>(c % kChunk / 4),
                     .high = static_cast<uint32_t>((codes[at] - low[at]) >> 8 & 255) << (c % 4 * 8)};
  }
}

// The scale of a row with far codes (table.h). Sizes are added by lane, lanes in order: the same bits everywhere.
template <Real kType>
KT_INLINE float far_scale(const uint8_t* source, int k) {
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
  near *= kNear / static_cast<float>(k > 0 ? k : 1);
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
    const float d = far_scale<kType>(source[i], k[i]);
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
        put_far<kType>(args.out, group, i, c, q, far.codes, count);
      }
  }
  far.start[s.k_pad / kChunk] = count;
  for (int i = 0; i < s.side; ++i) args.out.sums[row + i] = Isa::sum_of(sum[i]);
}

template <Real kType>
KT_INLINE void pack_row_float(const Acts& out, int row, const uint8_t* source, int k) {
  const ActShape& s = out.shape;
  const int whole = k / kUnit * kUnit;
  auto* group =
      reinterpret_cast<uint8_t*>(out.codes) + static_cast<int64_t>(row / s.side * s.side) * s.k_pad * 2;
  for (int c = 0; c < s.k_pad; c += kUnit) {
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
    for (int i = 0; args.out.shape.far && i < args.out.shape.rows; i += args.out.shape.side)
      pack_far_rows<kType>(args, i);
    if (args.out.shape.far) return;
  }
  for (int i = 0; i < args.out.shape.rows; ++i) {
    const int64_t row = i >= args.m ? 0 : args.index ? args.index[i] : i;
    const uint8_t* source = static_cast<const uint8_t*>(args.source) + row * args.stride * kSize;
    const int k = i < args.m ? args.k : 0;  // padding rows are rows without columns
    if (args.out.shape.code == ActCode::kS8)
      pack_row_s8<kType>(args.out, i, source, k);
    else
      pack_row_float<kType>(args.out, i, source, k);
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

KT_INLINE F32 activation_of(F32 gate, F32 up, const Activation& f) {
  const F32 one = Isa::set1(1.0f);
  if (f.kind == ActivationKind::kSwiGlu) {
    if (f.limit > 0) {
      gate = Isa::min(gate, Isa::set1(f.limit));
      up = Isa::max(Isa::min(up, Isa::set1(f.limit)), Isa::set1(-f.limit));
    }
    if (f.alpha > 0)
      return Isa::mul(Isa::mul(gate, sigmoid(Isa::mul(gate, Isa::set1(f.alpha)))), Isa::add(up, one));
    return Isa::mul(Isa::mul(gate, sigmoid(gate)), up);
  }
  if (f.kind == ActivationKind::kGeluTanh) {  // 0.5 (1 + tanh(z)) = sigmoid(2 z)
    const F32 cube = Isa::mul(Isa::mul(gate, gate), gate);
    const F32 z = Isa::mul(Isa::fma(cube, Isa::set1(0.044715f), gate), Isa::set1(1.5957691216f));
    return Isa::mul(Isa::mul(gate, sigmoid(z)), up);
  }
  alignas(64) float lanes[Isa::kLanes];
  Isa::store(lanes, gate);
  for (int i = 0; i < Isa::kLanes; ++i)
    lanes[i] = 0.5f * lanes[i] * (1.0f + __builtin_erff(lanes[i] * 0.70710678f));
  return Isa::mul(Isa::load(lanes), up);
}

void activate(const ActivateArgs& args) noexcept {
  for (int i = 0; i < args.m; ++i)
    for (int p = 0; p < args.pairs; ++p)
      for (int j = 0; j < kBlockRows; j += Isa::kLanes) {
        const float* from = args.gate_up + i * args.ld + p * 2 * kBlockRows + j;
        const int column = p * kBlockRows + j;
        F32 gate = Isa::load(from), up = Isa::load(from + kBlockRows);
        if (args.gate_bias) gate = Isa::add(gate, Isa::load(args.gate_bias + column));
        if (args.up_bias) up = Isa::add(up, Isa::load(args.up_bias + column));
        Isa::store(args.mid + i * args.mid_ld + column, activation_of(gate, up, args.activation));
      }
}

void add_scaled(float* y, const float* x, float weight, int n) noexcept {
  const F32 w = Isa::set1(weight);
  int i = 0;
  for (; i + Isa::kLanes <= n; i += Isa::kLanes)
    Isa::store(y + i, Isa::fma(Isa::load(x + i), w, Isa::load(y + i)));
  if (i == n) return;
  // The rest through copies: a scalar FMA on memory reads past its operand under some emulators.
  alignas(64) float from[Isa::kLanes] = {}, to[Isa::kLanes] = {};
  const size_t bytes = static_cast<size_t>(n - i) * sizeof(float);
  __builtin_memcpy(from, x + i, bytes);
  __builtin_memcpy(to, y + i, bytes);
  Isa::store(to, Isa::fma(Isa::load(from), w, Isa::load(to)));
  __builtin_memcpy(y + i, to, bytes);
}

void store(void* out, Real type, const float* x, int n) noexcept {
  int i = 0;
  auto* bytes = static_cast<uint8_t*>(out);
  for (; i + Isa::kLanes <= n; i += Isa::kLanes) {
    const F32 v = Isa::load(x + i);
    if (type == Real::kF32)
      Isa::store(static_cast<float*>(out) + i, v);
    else if (type == Real::kBf16)
      Isa::store_bf16(bytes + 2 * i, v);
    else
      Isa::store_f16(bytes + 2 * i, v);
  }
  for (; i < n; ++i) {
    if (type == Real::kF32)
      static_cast<float*>(out)[i] = x[i];
    else
      put_u16(bytes + 2 * i, type == Real::kBf16 ? f32_to_bf16(x[i]) : f32_to_f16(x[i]));
  }
}

// `buffer` holds at least 64 KiB of arbitrary finite data.
template <class I>
double peak_s8(int64_t rounds, void* buffer) noexcept {
  if constexpr (I::kTileUnit) {
    return I::peak_tiles_s8(rounds, buffer);
  } else {
    constexpr int kW = I::kPeakWeights, kA = I::kPeakActs;
    const auto* from = static_cast<const uint8_t*>(buffer);
    typename I::Bytes w[kW];
    typename I::Act a[kA];
    typename I::Acc acc[kW][kA];
    unroll<kW>([&](auto i) __attribute__((always_inline)) { w[i] = I::load_bytes(from + i * kPartBytes); });
    unroll<kA>([&](auto g) __attribute__((always_inline)) {
      a[g] = I::load_act(reinterpret_cast<const int8_t*>(from) + g * 64);
    });
    unroll<kW * kA>([&](auto at) __attribute__((always_inline)) { acc[at / kA][at % kA] = I::zero_acc(); });
    for (int64_t r = 0; r < rounds; ++r) {
      unroll<kW>([&](auto i) __attribute__((always_inline)) { I::opaque(w[i]); });
      unroll<kW * kA>([&](auto at) __attribute__((always_inline)) {
        I::template dot<false>(acc[at / kA][at % kA], w[at / kA], a[at % kA]);
      });
    }
    unroll<kW * kA>([&](auto at) __attribute__((always_inline)) {
      I::store(static_cast<int32_t*>(buffer) + at * I::kLanes, I::template total<0>(acc[at / kA][at % kA]));
    });
    return 2.0 * static_cast<double>(rounds) * kW * kA * kPartBytes * I::kTokens;
  }
}

template <class I>
double peak_bf16(int64_t rounds, void* buffer) noexcept {
  if constexpr (I::kTileUnit) {
    return I::peak_tiles_bf16(rounds, buffer);
  } else if constexpr (I::kBf16Product) {
    constexpr int kW = I::kPeakWeights, kA = I::kPeakActs;
    const auto* from = static_cast<const uint8_t*>(buffer);
    typename I::Bytes w[kW];
    typename I::Act a[kA];
    typename I::AccF acc[kW][kA];
    unroll<kW>([&](auto i) __attribute__((always_inline)) { w[i] = I::load_bytes(from + i * kPartBytes); });
    unroll<kA>([&](auto g) __attribute__((always_inline)) {
      a[g] = I::load_act(reinterpret_cast<const int8_t*>(from) + g * 64);
    });
    unroll<kW * kA>([&](auto at) __attribute__((always_inline)) { acc[at / kA][at % kA] = I::zero_accf(); });
    for (int64_t r = 0; r < rounds; ++r) {
      unroll<kW>([&](auto i) __attribute__((always_inline)) { I::opaque(w[i]); });
      unroll<kW * kA>([&](auto at) __attribute__((always_inline)) {
        I::dot_bf16(acc[at / kA][at % kA], w[at / kA], a[at % kA]);
      });
    }
    unroll<kW * kA>([&](auto at) __attribute__((always_inline)) {
      I::store(static_cast<float*>(buffer) + at * I::kLanes, I::template total<0>(acc[at / kA][at % kA]));
    });
    return 2.0 * static_cast<double>(rounds) * kW * kA * (kPartBytes / 2) * I::kTokens;
  } else {
    return 0;
  }
}

double peak_f32(int64_t rounds, void* buffer) noexcept {
  constexpr int kN = 12;
  auto* at = static_cast<float*>(buffer);
  F32 acc[kN], w = Isa::load(at), a = Isa::load(at + 16);
  // Of their own starts: sums that were known to be equal would be one.
  unroll<kN>([&](auto i) __attribute__((always_inline)) { acc[i] = Isa::load(at + i * Isa::kLanes); });
  for (int64_t r = 0; r < rounds; ++r)
    unroll<kN>([&](auto i) __attribute__((always_inline)) { acc[i] = Isa::fma(w, a, acc[i]); });
  unroll<kN>([&](auto i) __attribute__((always_inline)) { Isa::store(at + i * Isa::kLanes, acc[i]); });
  return 2.0 * static_cast<double>(rounds) * kN * Isa::kLanes;
}

// Loads only: the sum keeps the compiler from dropping them.
uint64_t read_bytes(const std::byte* from, size_t bytes) noexcept {
  const auto* at = reinterpret_cast<const uint8_t*>(from);
  constexpr int kWidth = static_cast<int>(sizeof(typename Isa::Bytes));
  auto sum = Isa::load_bytes(at);
  for (size_t i = 0; i + 512 <= bytes; i += 512) {
    if constexpr (Isa::kPrefetch > 0)
      for (int b = 0; b < 512; b += 64) Isa::prefetch(at + i + Isa::kPrefetch + b);
    for (int b = 0; b < 512; b += kWidth) sum = Isa::bor(sum, Isa::load_bytes(at + i + b));
  }
  alignas(64) uint8_t out[kWidth];
  Isa::store_bytes(out, sum);
  uint64_t result;
  __builtin_memcpy(&result, out, 8);
  return result;
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
