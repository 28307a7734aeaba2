// The table of kernels one ISA exports, and the plain values passed to them. Everything here is noexcept,
// allocates nothing and starts no thread: the caller brings memory (see plan.h for the sizes).
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/pack.h"

namespace kt::inline kernels {

enum class ActCode : uint8_t { kS8, kBf16, kF32 };
constexpr int bytes_of(ActCode code) { return code == ActCode::kS8 ? 1 : code == ActCode::kBf16 ? 2 : 4; }
enum class Real : uint8_t { kF32, kBf16, kF16 };  // element types of activations at the boundary

// Activations of one group of rows in the order the kernels read them.
//   codes   [rows/side, k_pad/step, side, step]   step columns: step_bytes / size of a code; kF32: plain rows
//   scales  [rows, scale_spans]   value = code * scale                       (kS8 only)
//   sums    [rows, sum_spans]     of the codes over each span of `sum_span`, times sum_factor  (kS8 only), or
//   values  [rows, sum_spans]     of the values there, as SumKind says
//   far     [rows/side]           lists of high bytes                        (kS8 with `far` only)
// Rows past the real ones and columns past k are zero codes.
inline constexpr int kActSpan =
    16;  // columns of one scale where sums are scaled as they grow: few, many_spans
// What a product takes from the activations beside their codes: the bias of all weights times the sum of the codes,
// exactly, or the mins or zero points of a span times the sum of the values.
enum class SumKind : uint8_t { kCodes, kValues };

// One scale for a whole row, where sums of whole rows are taken: the row's largest number is often many times its
// mean size, and a scale for it would leave the others few bits. So the scale is that of kNear times the mean size,
// a code is its low byte, and the high bytes that are not zero are listed: fewer than one in kNear columns.
//   code = low + 256 * high,  scale = max(min(largest, kNear * mean) / 127, largest / kFarthest)
inline constexpr float kNear = 7, kNearRounded = 6;  // the second where lists are by row, see below
inline constexpr float kFarthest = 127 * 256 + 127;
inline constexpr int kHuge = 2;  // the least high byte, either sign, whose weights must be finer than a byte
struct FarCode {
  uint16_t row;   // of the `side` rows that stand side by side; listed by row: the high byte, sign-extended
  uint16_t four;  // columns [4 four, 4 four + 4) of the 64; listed by row: of the row
  uint32_t high;  // one byte each, the first in the low bits; one of them is not zero
};
// The list of `side` rows: start[i] is the first of columns [64 i, 64 i + 64), start[k_pad / 64] the end. Where weights
// are rounded again in panels the list is by row, and the huge ones, which must meet finer weights (panel.inl.h), come
// last: start[2 (i * sum_spans + j)] is the first of span j of row i, and the next one its first huge code.
struct FarCodes {
  int32_t* start = nullptr;
  FarCode* codes = nullptr;
};

struct ActShape {
  ActCode code = ActCode::kF32;
  int rows = 0;  // padded: see padded_rows
  int k_pad = 0;
  int side = 1;        // rows that stand side by side
  int step_bytes = 0;  // of one row before the next one's
  int scale_span = 0, sum_span = 0;
  SumKind sums = SumKind::kCodes;
  int sum_factor = 1;
  bool beside = false;  // scales and sums as [rows / 8, spans, 8], the last group as wide as it is
  bool far = false;     // high bytes are listed; scale_span is k_pad
  bool by_row = false;  // and how
  bool operator==(const ActShape&) const = default;
  int scale_spans() const { return (k_pad + scale_span - 1) / scale_span; }
  int sum_spans() const { return (k_pad + sum_span - 1) / sum_span; }
  // Where the first of `spans` scales or sums of a row stands, and how far the next one is.
  int scale_step(int row) const { return !beside ? 1 : rows - row / 8 * 8 < 8 ? rows - row / 8 * 8 : 8; }
  int64_t scale_at(int row, int spans) const {
    return beside ? int64_t{row} / 8 * 8 * spans + row % 8 : int64_t{row} * spans;
  }
  // Of `side` rows' far codes: how many there may be, and bytes of the whole list.
  float near() const { return by_row ? kNearRounded : kNear; }
  int far_most() const { return side * (static_cast<int>(static_cast<float>(k_pad) / near()) + 1); }
  int far_starts() const { return by_row ? 2 * side * sum_spans() + 1 : k_pad / kChunk + 1; }
  size_t far_bytes() const {
    const int room = far_most() + (by_row ? far_most() / side : 0);  // where a row's huge ones wait
    return far ? (static_cast<size_t>(far_starts()) * 4 + static_cast<size_t>(room) * sizeof(FarCode) + 63) /
                     64 * 64
               : 0;
  }
};
struct Acts {
  ActShape shape;
  std::byte* codes = nullptr;
  float* scales = nullptr;
  int32_t* sums = nullptr;  // one of the two, as shape.sums says
  float* values = nullptr;
  std::byte* far = nullptr;  // [rows / side, far_bytes]
  FarCodes far_of(int row) const {
    std::byte* at = far + static_cast<size_t>(row / shape.side) * shape.far_bytes();
    return {reinterpret_cast<int32_t*>(at),
            reinterpret_cast<FarCode*>(at + static_cast<size_t>(shape.far_starts()) * 4)};
  }
};

// Rows of the input to quantise: row i is source row (index ? index[i] : i).
struct PackActsArgs {
  const void* source = nullptr;
  Real type = Real::kF32;
  int64_t stride = 0;              // elements between source rows
  const int32_t* index = nullptr;  // [m] or null
  int m = 0;                       // real rows; shape.rows - m more are zeroed
  int k = 0;
  // Columns of `out` to be packed, for all rows, or all: multiples of kChunk, and of both spans with kS8. Not with far
  // codes.
  int first = 0, last = -1;
  Acts out;
};

// Rows packed once, in plain order (side 1, nothing beside), to the order another shape asks for: out row i is row
// index[i] of `from`. Both are kS8 with the same k_pad and spans.
struct CopyActsArgs {
  Acts from;
  const int32_t* index = nullptr;
  int m = 0;  // real rows; out.shape.rows - m more are zeroed
  Acts out;
};

// out[i, r] = sum_k a[i, k] * w[r, k] for i < m and the 16*count rows of `count` packed row blocks.
struct MultiplyArgs {
  const Packing* packing = nullptr;
  const std::byte* blocks = nullptr;
  int count = 0;
  const std::byte* after =
      nullptr;  // what the caller will read next, to be fetched ahead at the end; may be null
  Acts acts;
  int m = 0;
  float* out = nullptr;  // [m, ld]
  int64_t ld = 0;
  std::byte* scratch = nullptr;  // scratch_bytes, 64-byte aligned
};

enum class ActivationKind : uint8_t { kSwiGlu, kGeluTanh, kGeluErf, kRelu };
// kSwiGlu: with limit > 0, gate = min(gate, limit) and up = clamp(up, -limit, limit) first; alpha == 0 gives
// silu(gate) * up, alpha > 0 gives gate * sigmoid(alpha * gate) * (up + 1).
// kGelu*: gelu(gate) * up. kRelu: max(gate, 0) * up.
struct Activation {
  ActivationKind kind = ActivationKind::kSwiGlu;
  float limit = 0, alpha = 0;
};

// mid[i, c] = f(gate, up) for columns interleaved in blocks of 16: gate block, up block, gate block ...
struct ActivateArgs {
  const float* gate_up = nullptr;  // [m, ld]
  int64_t ld = 0;
  int m = 0, pairs = 0;
  const float* gate_bias = nullptr;  // [16 * pairs] or null
  const float* up_bias = nullptr;
  Activation activation;
  float* mid = nullptr;  // [m, mid_ld], 16 * pairs columns written
  int64_t mid_ld = 0;
};

struct AttentionKernels;  // kernels/attention.h
struct RowKernels;        // kernels/row_ops.h

struct Kernels {
  const char* name;
  Fragment fragment;
  // order of packed kS8 and kBf16 activations (ActShape) for each route
  int few_side, few_step_bytes, many_side, many_step_bytes;
  int tile_rows;                   // `many` works on multiples of this many rows
  int few_limit;                   // `few` is the faster route up to this many rows (measured, bench/)
  int panel_blocks;                // row blocks `many` widens and multiplies together
  int panel_width;                 // of them side by side in one tile loop
  ActCode float_many;              // activations the float layouts take there
  ActCode few_acts[kLayoutCount];  // and every layout on the route of few rows
  using Multiply = void (*)(const MultiplyArgs&) noexcept;
  // [kLayoutCount] each
  const Multiply* few_long;    // activations: few_acts; null for layouts with short spans
  const Multiply* few_short;   // and null for those with long ones
  const Multiply* many_spans;  // null for float layouts, and where there is a tile unit
  const Multiply* many_s8;     // null for float layouts, and where there is none (portable has both)
  const Multiply* many_bf16;   // null when the ISA has no bf16 product
  const Multiply* many_f32;    // the reference: any layout, f32 activations, any m
  Multiply few(int layout) const {
    return (kLayouts[static_cast<size_t>(layout)].span == SpanLength::kLong ? few_long : few_short)[layout];
  }
  void (*pack_acts)(const PackActsArgs&) noexcept;
  void (*copy_acts)(const CopyActsArgs&) noexcept;
  void (*activate)(const ActivateArgs&) noexcept;
  // y[i] += weight * x[i], y[i] = x[i] + y[i] and conversions, n elements
  void (*add_scaled)(float* y, const float* x, float weight, int n) noexcept;
  void (*store)(void* out, Real type, const float* x, int n) noexcept;
  const AttentionKernels* attention;
  const RowKernels* rows;
  // Native multiply loops with independent accumulators, operands from L1; return operations done (2 per
  // multiply-add). Null when the ISA has no such product.
  double (*peak_s8)(int64_t rounds, void* buffer) noexcept;
  double (*peak_bf16)(int64_t rounds, void* buffer) noexcept;
  double (*peak_f32)(int64_t rounds, void* buffer) noexcept;
  // Reads `bytes` with the widest loads; returns a value that depends on all of them.
  uint64_t (*read)(const std::byte* from, size_t bytes) noexcept;
};

// The best table this CPU runs, or the one KT_ISA (or KT_KERNEL_CPU_VARIANT) names; an Error if the CPU lacks
// it.
const Kernels& best_kernels();
// By name, for tests and --isa: an Error listing the known names, or saying which feature the CPU lacks.
const Kernels& kernels_named(std::string_view name);

}  // namespace kt::inline kernels
