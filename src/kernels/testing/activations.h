// Packed activations by their definition (table.h), one element at a time, for tests.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "formats/floats.h"
#include "kernels/plan.h"

namespace kt::inline kernels {

// Standard normal numbers with an outlier here and there. [m, k]
inline std::vector<float> random_rows(int m, int64_t k, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<size_t>(m * k));
  for (float& x : out) x = random() % 64 ? normal(random) : 20 * normal(random);
  return out;
}

// What pack_acts must make of rows x columns [m, k]: codes in plain order.
struct PlainActs {
  ActShape shape;
  std::vector<float> codes;   // [rows, k_pad]; integers with kS8
  std::vector<float> scales;  // [rows, scale_spans]
  std::vector<int32_t> sums;  // [rows, sum_spans], or
  std::vector<float> values;
  double value(int row, int column) const {
    const double code = codes[static_cast<size_t>(row) * shape.k_pad + column];
    if (shape.code != ActCode::kS8) return code;
    return code * scales[static_cast<size_t>(row) * shape.scale_spans() + column / shape.scale_span];
  }
  double huge_value(int row, int column) const;
};

// What the high byte of a far code stands for if it is huge, else 0; the low one is signed too.
inline double PlainActs::huge_value(int row, int column) const {
  const double code = codes[static_cast<size_t>(row) * shape.k_pad + column],
               high = std::floor((code + 128) / 256);
  return std::fabs(high) < kHuge ? 0 : 256 * high * scales[static_cast<size_t>(row)];
}

// The scale of a row with far codes.
inline float far_scale(const float* row, int64_t k, float largest, float times) {
  float lanes[kBlockRows] = {}, mean = 0;
  for (int64_t c = 0; c < k; ++c) lanes[c % kBlockRows] += std::fabs(row[c]);
  for (const float lane : lanes) mean += lane;
  mean *= times / static_cast<float>(std::max<int64_t>(k, 1));
  return std::max(std::min(mean, largest) * (1.0f / 127), largest * (1.0f / kFarthest));
}

inline PlainActs plain_acts(const ActShape& s, const std::vector<float>& rows, int m, int64_t k) {
  PlainActs out;
  out.shape = s;
  out.codes.resize(static_cast<size_t>(s.rows) * s.k_pad);
  for (int i = 0; i < m; ++i)
    for (int64_t c = 0; c < k; ++c) {
      const float x = rows[i * k + c];
      out.codes[static_cast<size_t>(i) * s.k_pad + c] = s.code == ActCode::kBf16 ? to_f32(to_bf16(x)) : x;
    }
  if (s.code != ActCode::kS8) return out;
  out.scales.resize(static_cast<size_t>(s.rows) * s.scale_spans());
  out.sums.resize(static_cast<size_t>(s.rows) * s.sum_spans());
  out.values.resize(out.sums.size());
  for (int i = 0; i < s.rows; ++i) {
    float* codes = out.codes.data() + static_cast<size_t>(i) * s.k_pad;
    for (int from = 0; from < s.k_pad; from += s.scale_span) {
      const int to = std::min(s.k_pad, from + s.scale_span);
      float amax = 0;
      for (int c = from; c < to; ++c) amax = std::max(amax, std::fabs(codes[c]));
      float d = amax * (1.0f / 127);
      if (s.far) d = far_scale(codes, i < m ? k : 0, amax, s.near());
      if (!(d > 0x1p-120f)) d = 0;
      const float inverse = d > 0 ? 1.0f / d : 0.0f;
      for (int c = from; c < to; ++c) codes[c] = std::nearbyint(codes[c] * inverse);
      out.scales[static_cast<size_t>(i) * s.scale_spans() + from / s.scale_span] = d;
    }
    for (int c = 0; c < s.k_pad; ++c)
      out.sums[static_cast<size_t>(i) * s.sum_spans() + c / s.sum_span] +=
          s.sum_factor * static_cast<int32_t>(codes[c]);
    if (s.sums == SumKind::kCodes) continue;
    const int step = std::min(s.scale_span, s.sum_span);
    for (int from = 0; from < s.k_pad; from += step) {
      float sum = 0;
      for (int c = from; c < std::min(s.k_pad, from + step); ++c) sum += codes[c];
      out.values[static_cast<size_t>(i) * s.sum_spans() + from / s.sum_span] +=
          out.scales[static_cast<size_t>(i) * s.scale_spans() + from / s.scale_span] * sum;
    }
  }
  return out;
}

// What the list of far codes says of (row, column).
inline int far_part(const Acts& acts, int row, int column) {
  if (!acts.shape.far) return 0;
  const FarCodes far = acts.far_of(row);
  int sum = 0;
  if (acts.shape.by_row) {
    const int at = 2 * (row % acts.shape.side * acts.shape.sum_spans() + column / acts.shape.sum_span);
    for (int i = far.start[at]; i < far.start[at + 2]; ++i) {
      const int high = static_cast<int8_t>(far.codes[i].high >> (column % 4 * 8));
      if (far.codes[i].four != column / 4 || high == 0) continue;
      sum += 256 * high;
      const bool huge = std::abs(high) >= kHuge;
      if (high != static_cast<int16_t>(far.codes[i].row) || huge != (i >= far.start[at + 1])) return 1 << 30;
    }
    return sum;
  }
  for (int i = far.start[column / kChunk]; i < far.start[column / kChunk + 1]; ++i) {
    const FarCode& code = far.codes[i];
    if (code.row == row % acts.shape.side && code.four == column % kChunk / 4)
      sum += 256 * static_cast<int8_t>(code.high >> (column % 4 * 8));
  }
  return sum;
}

// The code of (row, column) in the packed order of table `t`.
inline float packed_act(const Kernels&, const Acts& acts, int row, int column) {
  const ActShape& s = acts.shape;
  if (s.code == ActCode::kF32)
    return reinterpret_cast<const float*>(acts.codes)[static_cast<int64_t>(row) * s.k_pad + column];
  const int size = s.code == ActCode::kS8 ? 1 : 2, step = s.step_bytes / size;
  // [rows/side, k_pad/step, side, step]
  const int64_t group = row / s.side, part = column / step;
  const int64_t at = ((group * (s.k_pad / step) + part) * s.side + row % s.side) * step + column % step;
  if (size == 1)
    return static_cast<float>(reinterpret_cast<const int8_t*>(acts.codes)[at] + far_part(acts, row, column));
  bf16 code;
  std::memcpy(&code, acts.codes + at * 2, 2);
  return to_f32(code);
}

}  // namespace kt::inline kernels
