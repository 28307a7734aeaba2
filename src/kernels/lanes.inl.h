// Arithmetic of 16 rows side by side, for calibrated rounding (gram.h). Products and sums are rounded one by
// one: the same bits on every ISA.
#pragma once
#include "kernels/gram.h"
#include "kernels/rows.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

inline constexpr float kToInteger = 12582912;  // 1.5 * 2^23: adding and taking it away rounds half to even

KT_INLINE F32 lanes_of(const float* from, int part) { return Isa::load(from + part * Isa::kLanes); }

// The nearest code of a value that is already divided by its scale.
KT_INLINE F32 nearest_of(F32 wanted, const RoundingLanes& l, int part) {
  const F32 code = Isa::min(Isa::max(wanted, lanes_of(l.lowest, part)), lanes_of(l.highest, part));
  return Isa::sub(Isa::add(code, Isa::set1(kToInteger)), Isa::set1(kToInteger));
}

void add_lanes(const float* factors, int count, const float* x, float* out, int64_t stride,
               int blocks) noexcept {
  for (int b = 0; b < blocks; ++b, x += stride, out += stride) {
    F32 sum[kParts];
    unroll<kParts>([&](auto i) __attribute__((always_inline)) { sum[i] = Isa::set1(0.0f); });
    for (int c = 0; c < count; ++c) {
      const F32 factor = Isa::set1(factors[c]);
      unroll<kParts>([&](auto i) __attribute__((always_inline)) {
        sum[i] = Isa::add(sum[i], Isa::mul(factor, lanes_of(x + c * kBlockRows, i)));
      });
    }
    unroll<kParts>([&](auto i) __attribute__((always_inline)) {
      Isa::store(out + i * Isa::kLanes, Isa::add(lanes_of(out, i), sum[i]));
    });
  }
}

void round_lanes(const RoundArgs& args) noexcept {
  const float* values = args.values;
  float* rest = args.rest;
  uint8_t* codes = args.codes;
  for (int b = 0; b < args.blocks; ++b, values += args.stride, rest += args.stride, codes += kBlockRows) {
    const RoundingLanes& l = args.lanes[b];
    float stored[kBlockRows];
    unroll<kParts>([&](auto i) __attribute__((always_inline)) {
      const F32 least = lanes_of(l.min, i);
      const F32 code =
          nearest_of(Isa::div(Isa::add(lanes_of(values, i), least), lanes_of(l.divisor, i)), l, i);
      const F32 rounded = Isa::sub(Isa::mul(code, lanes_of(l.scale, i)), least);
      Isa::store(rest + i * Isa::kLanes, Isa::sub(lanes_of(rest, i), rounded));
      Isa::store(stored + i * Isa::kLanes, Isa::add(code, lanes_of(l.offset, i)));
    });
    for (int r = 0; r < kBlockRows; ++r) codes[r] = static_cast<uint8_t>(static_cast<int32_t>(stored[r]));
  }
}

void scale_error(const ScaleErrorArgs& args) noexcept {
  F32 scale[kParts], error[kParts];
  unroll<kParts>([&](auto i) __attribute__((always_inline)) {
    scale[i] = lanes_of(args.scale, i);
    error[i] = Isa::set1(0.0f);
  });
  const float* values = args.values;
  for (int c = 0; c < args.columns; ++c, values += kBlockRows) {
    const F32 weight = Isa::set1(args.weight[c]);
    unroll<kParts>([&](auto i) __attribute__((always_inline)) {
      const F32 x = lanes_of(values, i);
      const F32 off = Isa::sub(x, Isa::mul(nearest_of(Isa::div(x, scale[i]), *args.lanes, i), scale[i]));
      error[i] = Isa::add(error[i], Isa::mul(Isa::mul(weight, off), off));
    });
  }
  unroll<kParts>([&](auto i)
                     __attribute__((always_inline)) { Isa::store(args.error + i * Isa::kLanes, error[i]); });
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
