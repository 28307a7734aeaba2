// What recurrent layers do beside their products (row_ops.h): short convolutions, gates, and the gated delta rule.
//
// The rule asks for two reads of a head's state and one update by every token. The update by one token and the reads
// for the next are one pass over the state here, d being known before it:
//   S = a S + k d';  u' = S'k', r' = S'q'   for the next k', q'
// and then d' = beta' (v' - a' u'), out' = a' r' + (q'.k') d'. Four multiply-adds, one load and one store for a number
// of the state and token. A piece of 32 columns stays in L1 meanwhile, where it is bound by arithmetic; with a single
// token it is bound by reading and writing the state. Each number is rounded as if every token had come alone.
#pragma once
#include "kernels/row_ops.inl.h"

namespace KT_ISA_NAMESPACE {
namespace {

using kt::DeltaArgs;
using kt::DeltaFactors;

KT_INLINE Lanes times_gate(const Lanes& x, const Lanes& gate, kt::GateKind kind) {
  return each([&](auto i) __attribute__((always_inline)) {
    const F32 factor = sigmoid(gate.v[i]);
    return Isa::mul(x.v[i], kind == kt::GateKind::kSilu ? Isa::mul(gate.v[i], factor) : factor);
  });
}

void gate_row(float* x, const float* gates, int n, kt::GateKind kind) noexcept {
  for (int at = 0; at < n; at += kBlockRows) {
    const Lanes v = load_some(x + at, n - at, 0.0f), g = load_some(gates + at, n - at, 0.0f);
    store_some(x + at, n - at, times_gate(v, g, kind));
  }
}

void convolve(const kt::ConvolveArgs& args) noexcept {
  for (int at = 0; at < args.n; at += kBlockRows) {
    const int count = args.n - at;
    Lanes sum = each([](auto) __attribute__((always_inline)) { return Isa::set1(0.0f); });
    for (int j = 0; j < args.taps; ++j) {
      const Lanes x = load_some(args.rows[j] + at, count, 0.0f);
      const Lanes w = load_some(args.weights + j * args.stride + at, count, 0.0f);
      sum = each([&](auto i) __attribute__((always_inline)) { return Isa::fma(x.v[i], w.v[i], sum.v[i]); });
    }
    store_some(args.y + at, count, each([&](auto i) __attribute__((always_inline)) {
                 return Isa::mul(sum.v[i], sigmoid(sum.v[i]));
               }));
  }
}

// Sums over the rows of a state, of kVectors vectors of columns: S'k and S'q. As many vectors as hide the latency of
// sums with the registers there are: a row of the state is four operations on each.
template <int kVectors>
struct DeltaSums {
  F32 u[kVectors], r[kVectors];
};

template <int kVectors>
KT_INLINE DeltaSums<kVectors> read_state(const DeltaArgs& args, int first) {
  const float *q = args.q, *k = args.k, *state = args.state + first;
  const int rows = args.rows;
  const int64_t columns = args.columns;
  DeltaSums<kVectors> sums;
  unroll<kVectors>([&](auto j) __attribute__((always_inline)) { sums.u[j] = sums.r[j] = Isa::set1(0.0f); });
  for (int i = 0; i < rows; ++i, state += columns) {
    const F32 ki = Isa::set1(k[i]), qi = Isa::set1(q[i]);
    unroll<kVectors>([&](auto j) __attribute__((always_inline)) {
      const F32 s = Isa::load(state + j * Isa::kLanes);
      sums.u[j] = Isa::fma(s, ki, sums.u[j]);
      sums.r[j] = Isa::fma(s, qi, sums.r[j]);
    });
  }
  return sums;
}

// What a token adds to the state, and its output.
template <int kVectors>
struct DeltaStep {
  F32 d[kVectors];
};

template <int kVectors>
KT_INLINE DeltaStep<kVectors> finish_token(const DeltaArgs& args, int first, int token,
                                           const DeltaSums<kVectors>& sums) {
  alignas(64) float part[kVectors * Isa::kLanes] = {};
  const int real = args.width - first, most = kVectors * Isa::kLanes;
  const auto bytes = static_cast<size_t>(real < most ? real : most) * sizeof(float);
  __builtin_memcpy(part, args.v + token * args.stride + first, bytes);
  const DeltaFactors& f = args.factors[token * args.factor_stride];
  const F32 decay = Isa::set1(f.decay), beta = Isa::set1(f.beta), dot = Isa::set1(f.dot);
  DeltaStep<kVectors> step;
  unroll<kVectors>([&](auto j) __attribute__((always_inline)) {
    const F32 v = Isa::load(part + j * Isa::kLanes);
    step.d[j] = Isa::mul(beta, Isa::sub(v, Isa::mul(decay, sums.u[j])));
    Isa::store(part + j * Isa::kLanes, Isa::fma(dot, step.d[j], Isa::mul(decay, sums.r[j])));
  });
  __builtin_memcpy(args.out + token * args.out_stride + first, part, bytes);
  return step;
}

// The state after the token; and the reads for the next one, where there is one.
template <int kVectors, bool kNext>
KT_INLINE DeltaSums<kVectors> update_state(const DeltaArgs& args, int first, int token,
                                           const DeltaStep<kVectors>& step) {
  const float* k = args.k + token * args.stride;
  const float *next_k = kNext ? k + args.stride : k, *next_q = args.q + (token + kNext) * args.stride;
  float* state = args.state + first;
  const int rows = args.rows;
  const int64_t columns = args.columns;
  const F32 decay = Isa::set1(args.factors[token * args.factor_stride].decay);
  DeltaSums<kVectors> sums;
  unroll<kVectors>([&](auto j) __attribute__((always_inline)) { sums.u[j] = sums.r[j] = Isa::set1(0.0f); });
  for (int i = 0; i < rows; ++i, state += columns) {
    const F32 ki = Isa::set1(k[i]), nk = Isa::set1(next_k[i]), nq = Isa::set1(next_q[i]);
    unroll<kVectors>([&](auto j) __attribute__((always_inline)) {
      float* at = state + j * Isa::kLanes;
      const F32 s = Isa::fma(ki, step.d[j], Isa::mul(decay, Isa::load(at)));
      Isa::store(at, s);
      if constexpr (kNext) {
        sums.u[j] = Isa::fma(s, nk, sums.u[j]);
        sums.r[j] = Isa::fma(s, nq, sums.r[j]);
      }
    });
  }
  return sums;
}

template <int kVectors>
KT_INLINE void delta_columns(const DeltaArgs& args, int first) {
  DeltaSums<kVectors> sums = read_state<kVectors>(args, first);
  for (int t = 0; t + 1 < args.tokens; ++t)
    sums = update_state<kVectors, true>(args, first, t, finish_token<kVectors>(args, first, t, sums));
  const int last = args.tokens - 1;
  update_state<kVectors, false>(args, first, last, finish_token<kVectors>(args, first, last, sums));
}

void delta_rule(const DeltaArgs& args) noexcept {
  if (args.tokens == 0) return;
  constexpr int kFew = kParts, kMany = kParts == 1 ? 2 : kParts;  // vectors; the first are 16 columns
  int first = 0;
  for (; first + kMany * Isa::kLanes <= args.columns; first += kMany * Isa::kLanes)
    delta_columns<kMany>(args, first);
  for (; first < args.columns; first += kBlockRows) delta_columns<kFew>(args, first);
}

}  // namespace
}  // namespace KT_ISA_NAMESPACE
