#include "nn/factor_products.h"

#include <algorithm>
#include <cstring>

#include "kernels/gram.h"

namespace kt::inline nn {
namespace {

// Columns of the wide operand of an outer sum that are packed and multiplied together.
constexpr int kWide = 256;
constexpr int kNarrow = 16;  // of the other: fewer, beside less than kWide, are summed in f32

}  // namespace

FactorProducts::FactorProducts(const Kernels& kernels, bool bf16)
    : kernels_(kernels), back_(back_kernels(kernels)), bf16_(bf16 && back_.pack_panel != nullptr) {
  if (bf16_)
    panel_ = packing_for({Code::kBf16, 0, Scale::kNone, Min::kNone, {}}, kBlockRows, kChunk, kernels.fragment,
                         "factor");
}

Packing FactorProducts::panel(int k) const {
  Packing p = panel_;
  p.k = k;
  p.k_pad = p.span = p.record_k = round_up(k, kChunk);
  p.block_bytes = panel_.block_bytes / kChunk * static_cast<size_t>(p.k_pad);
  return p;
}

void FactorProducts::turn(const Turn& of) const noexcept {
  if (bf16_) {
    const int lanes = std::min(of.lanes, of.blocks * kBlockRows);
    back_.pack_panel({.from = of.from,
                      .ld = of.lane_step == 1 ? of.k_step : of.lane_step,
                      .across = of.lane_step != 1,
                      .rows = of.k,
                      .columns = lanes,
                      .k_pad = of.k_pad,
                      .out = of.out,
                      .out_stride = of.out_stride});
    for (int b = ceil_div(lanes, kBlockRows); b < of.blocks; ++b)
      std::memset(of.out + b * of.out_stride, 0, static_cast<size_t>(of.k_pad * row_bytes()));
    return;
  }
  for (int b = 0; b < of.blocks; ++b) {
    const int lanes = std::clamp(of.lanes - b * kBlockRows, 0, kBlockRows);
    auto* to = reinterpret_cast<float*>(of.out + b * of.out_stride);
    const float* from = of.from + b * kBlockRows * of.lane_step;
    for (int k = 0; k < of.k; ++k, to += kBlockRows, from += of.k_step) {
      for (int i = 0; i < lanes; ++i) to[i] = from[i * of.lane_step];
      for (int i = lanes; i < kBlockRows; ++i) to[i] = 0;
    }
    if (of.k < of.k_pad) std::fill_n(to, (of.k_pad - of.k) * kBlockRows, 0.0f);
  }
}

ActShape FactorProducts::acts_shape(int m, int k) const {
  return plan_route(kernels_, panel(k), Route::kManyBf16, m).acts;
}

size_t FactorProducts::acts_bytes(int m, int k) const {
  return round_up(act_bytes(acts_shape(m, k)), size_t{64});
}

size_t FactorProducts::product_bytes(int m, int k) const {
  return bf16_ ? acts_bytes(m, k) + plan_route(kernels_, panel(k), Route::kManyBf16, m).scratch_bytes : 0;
}

Acts FactorProducts::pack(const Product& p, std::byte* memory) const noexcept {
  const Acts acts = acts_in(acts_shape(p.m, p.k), memory);
  kernels_.pack_acts({.source = p.a,
                      .type = p.type,
                      .stride = p.a_stride,
                      .index = p.index,
                      .m = p.m,
                      .k = p.k,
                      .out = acts});
  return acts;
}

void FactorProducts::multiply_packed(const Acts& rows, int m, const std::byte* turned, int blocks, float* out,
                                     int64_t out_stride, std::byte* scratch) const noexcept {
  const Packing packing = panel(rows.shape.k_pad);
  kernels_.many_bf16[packing.layout]({.packing = &packing,
                                      .blocks = turned,
                                      .count = blocks,
                                      .acts = rows,
                                      .m = m,
                                      .out = out,
                                      .ld = out_stride,
                                      .scratch = scratch});
}

void FactorProducts::multiply(const Product& p, std::byte* scratch) const noexcept {
  if (!bf16_) {
    KT_DCHECK(p.type == Real::kF32 && !p.index, "rows of f32 in their order");
    gram_kernels(kernels_).product_f32({.a = static_cast<const float*>(p.a),
                                        .a_stride = p.a_stride,
                                        .m = p.m,
                                        .k = p.k,
                                        .b = reinterpret_cast<const float*>(p.turned),
                                        .b_stride = block_bytes(p.k) / 4,
                                        .blocks = p.blocks,
                                        .out = p.out,
                                        .out_stride = p.out_stride});
    return;
  }
  multiply_packed(pack(p, scratch), p.m, p.turned, p.blocks, p.out, p.out_stride,
                  scratch + acts_bytes(p.m, p.k));
}

// Where the parts of an outer sum lie: the columns of a as rows, then as activations; columns of b as a right operand;
// their product.
struct FactorProducts::SumScratch {
  size_t turned = 0, acts = 0, panel = 0, tile = 0, multiply = 0, bytes = 0;
};

FactorProducts::SumScratch FactorProducts::sum_scratch(int a_columns) const {
  const Plan plan = plan_route(kernels_, panel(kMostRows), Route::kManyBf16, a_columns);
  SumScratch s;
  const auto place = [&](size_t bytes) {
    const size_t at = s.bytes;
    s.bytes += round_up(bytes, size_t{64});
    return at;
  };
  s.turned = place(sizeof(float) * a_columns * kMostRows);
  s.acts = place(act_bytes(plan.acts));
  s.panel = place(size_t{kWide} * kMostRows * 2);
  s.tile = place(sizeof(float) * a_columns * kWide);
  s.multiply = place(plan.scratch_bytes);
  return s;
}

size_t FactorProducts::sum_bytes(int a_columns) const {
  return bf16_ && a_columns > 0 ? sum_scratch(a_columns).bytes : 0;
}

void FactorProducts::outer_sum(const OuterSumArgs& args, std::byte* scratch) const noexcept {
  if (!bf16_ || (args.a_columns < kNarrow && args.b_columns < kWide)) return back_.outer_sum(args);
  for (int first = 0; first < args.rows; first += kMostRows)
    sum_rows(args, first, std::min(kMostRows, args.rows - first), scratch);
}

void FactorProducts::sum_rows(const OuterSumArgs& args, int first, int rows,
                              std::byte* scratch) const noexcept {
  const SumScratch at = sum_scratch(args.a_columns);
  auto* const turned = reinterpret_cast<float*>(scratch + at.turned);
  for (int t = 0; t < rows; ++t)
    for (int i = 0; i < args.a_columns; ++i)
      turned[int64_t{i} * kMostRows + t] = args.a[(first + t) * args.a_ld + i];
  const Packing packing = panel(rows);
  const Plan plan = plan_route(kernels_, packing, Route::kManyBf16, args.a_columns);
  const Acts acts = acts_in(plan.acts, scratch + at.acts);
  kernels_.pack_acts({.source = turned, .stride = kMostRows, .m = args.a_columns, .k = rows, .out = acts});
  const int64_t size = args.b_type == Real::kF32 ? 4 : 2, at_row = args.index ? 0 : first * args.b_ld;
  auto* const tile = reinterpret_cast<float*>(scratch + at.tile);
  for (int c = 0; c < args.b_columns; c += kWide) {
    const int columns = std::min(kWide, args.b_columns - c), blocks = ceil_div(columns, kBlockRows);
    const int ld = blocks * kBlockRows;
    back_.pack_panel({.from = static_cast<const std::byte*>(args.b) + (at_row + c) * size,
                      .type = args.b_type,
                      .ld = args.b_ld,
                      .index = args.index ? args.index + first : nullptr,
                      .rows = rows,
                      .columns = columns,
                      .k_pad = packing.k_pad,
                      .out = scratch + at.panel,
                      .out_stride = static_cast<int64_t>(packing.block_bytes)});
    plan.multiply({.packing = &packing,
                   .blocks = scratch + at.panel,
                   .count = blocks,
                   .acts = acts,
                   .m = args.a_columns,
                   .out = tile,
                   .ld = ld,
                   .scratch = scratch + at.multiply});
    float* const out = args.out + c * args.out_step;
    if (args.out_step == 1) {
      for (int i = 0; i < args.a_columns; ++i)
        kernels_.add_scaled(out + i * args.out_ld, tile + int64_t{i} * ld, args.factor, columns);
    } else {
      for (int j = 0; j < columns; ++j)
        for (int i = 0; i < args.a_columns; ++i)
          out[i * args.out_ld + j * args.out_step] += args.factor * tile[int64_t{i} * ld + j];
    }
  }
}

}  // namespace kt::inline nn
