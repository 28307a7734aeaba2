// Work on rows of activations: the activation between the projections, the weighted sum, and the loops that measure
// this machine's limits.
#pragma once
#include "kernels/acts.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

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
  if (f.kind == ActivationKind::kRelu) return Isa::mul(Isa::max(Isa::set1(0.0f), gate), up);
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
    constexpr int kColumns = kPartBytes / 2;
    return 2.0 * static_cast<double>(rounds) * kW * kA * kColumns * I::kTokens;
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
