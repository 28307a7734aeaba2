// The way back through the activation between the projections: derivatives of f(gate, up) as activate() computes it
// (rows.inl.h), with sums of 16 lanes, joined in one order. A clamp lets through what is not beyond it, as torch's
// does.
#pragma once
#include "kernels/math.inl.h"
#include "kernels/transpose.h"

namespace KT_ISA_NAMESPACE {
namespace {

using kt::ActivateBackArgs;
using kt::Activation;
using kt::ActivationKind;
using kt::Real;

inline constexpr int kBackLanes = kt::kBlockRows;

struct ActivationSlopes {
  F32 value, gate, up;  // f, df/dgate, df/dup
};

KT_INLINE F32 one_less(F32 x) { return Isa::sub(Isa::set1(1.0f), x); }

// SwiGLU of numbers that are clamped already.
KT_INLINE ActivationSlopes swiglu_slopes(F32 gate, F32 up, float alpha) {
  const F32 z = alpha > 0 ? Isa::mul(gate, Isa::set1(alpha)) : gate;
  const F32 s = sigmoid(z), factor = alpha > 0 ? Isa::add(up, Isa::set1(1.0f)) : up,
            swish = Isa::mul(gate, s);
  const F32 slope = Isa::mul(s, Isa::fma(z, one_less(s), Isa::set1(1.0f)));
  return {Isa::mul(swish, factor), Isa::mul(slope, factor), swish};
}

KT_INLINE ActivationSlopes gelu_tanh_slopes(F32 gate, F32 up) {
  const F32 square = Isa::mul(gate, gate), two = Isa::set1(1.5957691216f);
  const F32 z = Isa::mul(Isa::fma(Isa::mul(square, gate), Isa::set1(0.044715f), gate), two);
  const F32 slope_z = Isa::mul(Isa::fma(square, Isa::set1(3 * 0.044715f), Isa::set1(1.0f)), two);
  const F32 s = sigmoid(z), gelu = Isa::mul(gate, s);
  const F32 slope = Isa::fma(Isa::mul(gelu, one_less(s)), slope_z, s);
  return {Isa::mul(gelu, up), Isa::mul(slope, up), gelu};
}

KT_INLINE ActivationSlopes gelu_erf_slopes(F32 gate, F32 up) {
  alignas(64) float below[Isa::kLanes];
  Isa::store(below, gate);
  for (int i = 0; i < Isa::kLanes; ++i) below[i] = 0.5f * (1.0f + __builtin_erff(below[i] * 0.70710678f));
  const F32 part = Isa::load(below), gelu = Isa::mul(gate, part);
  const F32 density = Isa::mul(exp(Isa::mul(Isa::mul(gate, gate), Isa::set1(-0.5f))), Isa::set1(0.39894228f));
  return {Isa::mul(gelu, up), Isa::mul(Isa::fma(gate, density, part), up), gelu};
}

// None at 0, as torch has it.
KT_INLINE ActivationSlopes relu_slopes(F32 gate, F32 up) {
  alignas(64) float x[Isa::kLanes], slope[Isa::kLanes];
  Isa::store(x, gate);
  for (int i = 0; i < Isa::kLanes; ++i) slope[i] = x[i] > 0 ? 1.0f : 0.0f;
  const F32 relu = Isa::max(Isa::set1(0.0f), gate);
  return {Isa::mul(relu, up), Isa::mul(Isa::load(slope), up), relu};
}

KT_INLINE ActivationSlopes slopes_of(F32 gate, F32 up, const Activation& f) {
  if (f.kind == ActivationKind::kGeluTanh) return gelu_tanh_slopes(gate, up);
  if (f.kind == ActivationKind::kGeluErf) return gelu_erf_slopes(gate, up);
  if (f.kind == ActivationKind::kRelu) return relu_slopes(gate, up);
  if (!(f.limit > 0)) return swiglu_slopes(gate, up, f.alpha);
  const F32 most = Isa::set1(f.limit), least = Isa::set1(-f.limit);
  ActivationSlopes s = swiglu_slopes(Isa::min(gate, most), Isa::max(Isa::min(up, most), least), f.alpha);
  alignas(64) float x[2][Isa::kLanes], slope[2][Isa::kLanes];
  Isa::store(x[0], gate);
  Isa::store(x[1], up);
  Isa::store(slope[0], s.gate);
  Isa::store(slope[1], s.up);
  for (int i = 0; i < Isa::kLanes; ++i) {
    slope[0][i] = x[0][i] > f.limit ? 0.0f : slope[0][i];
    slope[1][i] = x[1][i] > f.limit || x[1][i] < -f.limit ? 0.0f : slope[1][i];
  }
  return {s.value, Isa::load(slope[0]), Isa::load(slope[1])};
}

KT_INLINE F32 load_kept(const void* row, Real type, int64_t at) {
  if (type == Real::kF32) return Isa::load(static_cast<const float*>(row) + at);
  return Isa::load_bf16(static_cast<const uint8_t*>(row) + at * 2);
}

// One row; what is beyond `columns` in a block becomes zeros, and so do the blocks behind.
KT_INLINE float activate_back_row(const ActivateBackArgs& args, int row) {
  const int64_t size = args.type == Real::kF32 ? 4 : 2;
  const auto* gates = static_cast<const uint8_t*>(args.gate) + row * args.stride * size;
  const auto* ups = static_cast<const uint8_t*>(args.up) + row * args.stride * size;
  const float* grad = args.mid_grad + row * args.ld;
  float *mid = args.mid + row * args.ld, *gate_grad = args.gate_grad + row * args.out_ld,
        *up_grad = args.up_grad + row * args.out_ld;
  const F32 weight = Isa::set1(args.weights[row]), zero = Isa::set1(0.0f);
  F32 sums[kBackLanes / Isa::kLanes];
  for (F32& sum : sums) sum = zero;
  for (int b = 0; b < args.blocks; ++b, gate_grad += args.out_step, up_grad += args.out_step) {
    const int left = args.columns - b * kBackLanes;
    alignas(64) float some[kBackLanes] = {};
    if (left > 0 && left < kBackLanes)
      __builtin_memcpy(some, grad + b * kBackLanes, static_cast<size_t>(left) * sizeof(float));
    for (int p = 0, i = 0; i < kBackLanes; i += Isa::kLanes, ++p) {
      if (left <= 0) {
        Isa::store(mid + b * kBackLanes + i, zero);
        Isa::store(gate_grad + i, zero);
        Isa::store(up_grad + i, zero);
        continue;
      }
      const int column = b * kBackLanes + i;
      F32 gate = load_kept(gates, args.type, b * args.step + i),
          up = load_kept(ups, args.type, b * args.step + i);
      if (args.gate_bias) gate = Isa::add(gate, Isa::load(args.gate_bias + column));
      if (args.up_bias) up = Isa::add(up, Isa::load(args.up_bias + column));
      const F32 d = Isa::load(left < kBackLanes ? some + i : grad + column);
      const ActivationSlopes f = slopes_of(gate, up, args.activation);
      sums[p] = Isa::fma(d, f.value, sums[p]);
      const F32 weighted = Isa::mul(d, weight);
      Isa::store(mid + column, f.value);
      Isa::store(gate_grad + i, Isa::mul(weighted, f.gate));
      Isa::store(up_grad + i, Isa::mul(weighted, f.up));
    }
  }
  alignas(64) float lane[kBackLanes];
  for (int p = 0; p < kBackLanes / Isa::kLanes; ++p) Isa::store(lane + p * Isa::kLanes, sums[p]);
  for (int n = kBackLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) lane[i] += lane[i + n];
  return lane[0];
}

void activate_back(const ActivateBackArgs& args) noexcept {
  for (int i = 0; i < args.m; ++i) args.weights_grad[i] += activate_back_row(args, i);
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
