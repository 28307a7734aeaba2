// Kernels of single rows of f32 beside the products: norms, rotations, scores of routers, rows of the cache, and
// what recurrent layers do to their states.
#pragma once
#include <cstdint>

#include "kernels/attention.h"

namespace kt::inline kernels {

// Heads of one token, rotated in place: pairs (i, i + half), or (2 i, 2 i + 1) where interleaved, of each head's first
// 2 * half numbers.
struct RotateArgs {
  float* x = nullptr;
  int heads = 0;
  int64_t stride = 0;  // between heads
  int half = 0;
  bool interleaved = false;
  const float* cosines = nullptr;  // [half]
  const float* sines = nullptr;
};

// Neighbouring tokens' keys or values of one head, for a block of the cache (attention.h).
struct CacheRows {
  KvType type = KvType::kBf16;
  bool keys = false;  // else values
  const float* rows = nullptr;
  int64_t stride = 0;  // between rows
  int count = 0;
  int slot = 0;  // of the first one; slot + count <= kKvBlock
  int width = 0;
  int width_pad = 0;  // of the block; columns from `width` on become zeros up to a multiple of 16 of them
  void* block = nullptr;
  float* scales = nullptr;  // [kKvBlock], for kS8: of a row, its largest size / 127
};

// A short causal convolution of one token, each column by itself: y = silu(sum_j weights[j] * rows[j]).
struct ConvolveArgs {
  const float* const* rows = nullptr;  // [taps] of the tokens, the oldest first
  int taps = 0;
  const float* weights = nullptr;
  int64_t stride = 0;  // between the weights of taps
  int n = 0;           // columns
  float* y = nullptr;
};

// What multiplies a row: sigmoid(gate), or gate * sigmoid(gate).
enum class GateKind : uint8_t { kSigmoid, kSilu };

// The gated delta rule over neighbouring columns of one head's state S, token after token:
//   d = beta (v - decay S'k);  S = decay S + k d';  out = S'q
// Columns know nothing of each other, and whoever cuts tokens or columns in pieces gets the same bits.
inline constexpr int kDeltaColumns = 32;  // of a piece at most; with 128 rows it stays in L1 over all tokens
struct DeltaFactors {
  float decay = 0, beta = 0;
  float dot = 0;  // q . k
};
struct DeltaArgs {
  float* state = nullptr;  // [rows, columns], aligned to 64 bytes
  int rows = 0;            // numbers of a key
  int columns = 0;         // a multiple of 16
  int width = 0;           // how many of them values have; the others stay 0
  int tokens = 0;
  const float* q = nullptr;  // [tokens, stride]
  const float* k = nullptr;
  const float* v = nullptr;
  int64_t stride = 0;
  const DeltaFactors* factors = nullptr;  // [tokens, factor_stride]
  int64_t factor_stride = 0;
  float* out = nullptr;  // [tokens, out_stride]
  int64_t out_stride = 0;
};

// The same bits on every ISA: sums are of 16 lanes, joined in one order.
struct RowKernels {
  // y = x / sqrt(mean(x^2) + eps) * weight, n numbers; y may be x.
  void (*norm)(const float* x, const float* weight, float eps, int n, float* y) noexcept;
  void (*rotate)(const RotateArgs&) noexcept;
  void (*softmax)(float* x, int n) noexcept;  // n > 0; numbers far below the largest become 2^-125, not 0
  void (*sigmoid)(float* x, int n) noexcept;
  void (*write_cache)(const CacheRows&) noexcept;
  float (*dot)(const float* x, const float* y, int n) noexcept;
  void (*gate)(float* x, const float* gates, int n, GateKind kind) noexcept;  // in place
  void (*convolve)(const ConvolveArgs&) noexcept;
  void (*delta_rule)(const DeltaArgs&) noexcept;
  // y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias, n numbers; y may be x.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n,
                     float* y) noexcept;
};

}  // namespace kt::inline kernels
