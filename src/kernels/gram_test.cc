// Symmetric updates, every table against sums in double precision of the numbers rounded to bf16.
#include "kernels/gram.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/memory.h"
#include "formats/floats.h"
#include "kernels/testing/activations.h"
#include "kernels/testing/tables.h"

namespace kt::inline kernels {
namespace {

float rounded(float x) { return to_f32(to_bf16(x)); }

struct Gram {
  const GramKernels& kernels;
  int rows, columns, strips;
  Buffer panels, scratch;
  std::vector<float> h;  // [columns, columns], starts at 1

  Gram(const Kernels& table, int rows_of, int columns_of)
      : kernels(gram_kernels(table)),
        rows(rows_of),
        columns(columns_of),
        strips(ceil_div(columns, kGramSide)),
        panels(static_cast<size_t>(ceil_div(rows, kGramRows) * panel_bytes())),
        scratch(
            static_cast<size_t>(gram_strip_bytes() + int64_t{strips} * strips * kGramSide * kGramSide * 4)),
        h(static_cast<size_t>(columns * columns), 1.0f) {}
  int64_t panel_bytes() const { return gram_panel_bytes(columns, kernels.code_bytes); }

  bool pack(const void* x, Real type, const float* factors) {
    bool finite = true;
    for (int first = 0; first < rows; first += kGramGroup) {
      const int count = std::min(kGramGroup, rows - first);
      const void* at[kGramGroup];
      for (int i = 0; i < count; ++i)
        at[i] =
            static_cast<const std::byte*>(x) + int64_t{first + i} * columns * (type == Real::kF32 ? 4 : 2);
      finite &= kernels.pack({.rows = at,
                              .type = type,
                              .factors = factors ? factors + first : nullptr,
                              .count = count,
                              .columns = columns,
                              .group = first % kGramRows / kGramGroup,
                              .panel = panels.data() + first / kGramRows * panel_bytes()});
    }
    return finite;
  }

  void add(int side) {
    for (int i = 0; i < strips; i += side)
      for (int j = 0; j <= i; j += side)
        kernels.add({.panels = panels.data(),
                     .rows = rows,
                     .columns = columns,
                     .row0 = i,
                     .row_strips = std::min(side, strips - i),
                     .column0 = j,
                     .column_strips = std::min(side, strips - j),
                     .sums = reinterpret_cast<float*>(scratch.data() + gram_strip_bytes()),
                     .strip = scratch.data(),
                     .out = h.data(),
                     .ld = columns});
  }
};

// f32 sums of `rows` products that are exact, in any order, and two more roundings: (rows + 2) * 2^-24 of the
// magnitudes. Nothing above the diagonal changes.
void check(const Gram& gram, const std::vector<float>& x) {
  for (int i = 0; i < gram.columns; ++i)
    for (int j = 0; j < gram.columns; ++j) {
      const float found = gram.h[static_cast<size_t>(i * gram.columns + j)];
      if (j > i) {
        ASSERT_EQ(found, 1) << i << " " << j;
        continue;
      }
      double sum = 1, magnitude = 1;
      for (int t = 0; t < gram.rows; ++t) {
        const double product = double{x[static_cast<size_t>(t * gram.columns + i)]} *
                               double{x[static_cast<size_t>(t * gram.columns + j)]};
        sum += product;
        magnitude += std::fabs(product);
      }
      ASSERT_NEAR(found, sum, (gram.rows + 2) * 0x1p-24 * magnitude) << i << " " << j;
    }
}

TEST(Gram, AgainstDouble) {
  for (const Kernels* table : tables_under_test()) {
    SCOPED_TRACE(table->name);
    for (const auto& [rows, columns] : {std::pair{1, 1},
                                        {31, 17},
                                        {32, 32},
                                        {33, 33},
                                        {513, 48},
                                        {1100, 40},
                                        {64, 96},
                                        {7, 131},
                                        {512, 131}}) {
      SCOPED_TRACE(testing::Message() << rows << " rows of " << columns);
      const auto x = random_rows(rows, columns, 3);
      auto factors = random_rows(rows, 1, 4);
      std::vector<float> weighed(x.size());
      std::vector<bf16> halves;
      std::vector<float> whole;
      for (size_t i = 0; i < x.size(); ++i) {
        weighed[i] = rounded(x[i] * factors[i / static_cast<size_t>(columns)]);
        halves.push_back(to_bf16(x[i]));
        whole.push_back(to_f32(halves.back()));
      }
      Gram gram(*table, rows, columns);
      ASSERT_TRUE(gram.pack(x.data(), Real::kF32, factors.data()));
      gram.add(1);
      check(gram, weighed);
      Gram other(*table, rows, columns);
      ASSERT_TRUE(other.pack(halves.data(), Real::kBf16, nullptr));
      other.add(3);
      check(other, whole);
    }
  }
}

// Any cut into squares, and either route of packing, gives the same bits; the last panel is whole or not.
TEST(Gram, SameBitsInAnySquares) {
  for (const Kernels* table : tables_under_test())
    for (const auto& [rows, columns] : {std::pair{700, 160}, {512, 96}}) {
      SCOPED_TRACE(testing::Message() << table->name << " " << rows << " rows of " << columns);
      const auto x = random_rows(rows, columns, 5);
      std::vector<bf16> halves;
      std::vector<float> whole;
      for (const float value : x) {
        halves.push_back(to_bf16(value));
        whole.push_back(to_f32(halves.back()));
      }
      Gram one(*table, rows, columns);
      ASSERT_TRUE(one.pack(halves.data(), Real::kBf16, nullptr));
      one.add(one.strips);
      for (const int side : {1, 2, 3}) {
        Gram gram(*table, rows, columns);
        ASSERT_TRUE(gram.pack(whole.data(), Real::kF32, nullptr));
        gram.add(side);
        ASSERT_EQ(gram.h, one.h) << side;
      }
    }
}

TEST(Gram, SeesWhatIsNotFinite) {
  for (const Kernels* table : tables_under_test()) {
    SCOPED_TRACE(table->name);
    for (const int columns : {5, 64})
      for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity(), 3.4e38f})
        for (const int at : {0, 3, columns - 1}) {
          auto x = random_rows(40, columns, 6);
          Gram gram(*table, 40, columns);
          EXPECT_TRUE(gram.pack(x.data(), Real::kF32, nullptr));
          x[static_cast<size_t>(39 * columns + at)] = bad;
          EXPECT_FALSE(gram.pack(x.data(), Real::kF32, nullptr));
          std::vector<bf16> halves;
          for (const float value : x) halves.push_back(to_bf16(value));
          std::swap(halves[static_cast<size_t>(39 * columns + at)], halves[static_cast<size_t>(at)]);
          EXPECT_FALSE(gram.pack(halves.data(), Real::kBf16, nullptr));
        }
  }
}

// f32 sums in order: k * 2^-24 of the magnitudes. Rows do not depend on each other, nor on what is beside
// them.
TEST(Gram, ProductsOfF32) {
  for (const Kernels* table : tables_under_test()) {
    SCOPED_TRACE(table->name);
    for (const auto& [m, k, blocks] :
         {std::tuple{1, 1, 1}, {7, 64, 2}, {8, 300, 3}, {17, 513, 1}, {64, 128, 5}}) {
      SCOPED_TRACE(testing::Message() << m << " by " << k << ", " << blocks << " blocks");
      const int a_stride = k + 3, out_stride = blocks * 16 + 5;
      const int64_t b_stride = int64_t{k} * 16 + 32;
      const auto a = random_rows(m, a_stride, 7);
      const auto b = random_rows(blocks, b_stride, 8);
      std::vector<float> out(static_cast<size_t>(m * out_stride), -1), alone(out.size(), -1);
      const ProductF32Args args{.a = a.data(),
                                .a_stride = a_stride,
                                .m = m,
                                .k = k,
                                .b = b.data(),
                                .b_stride = b_stride,
                                .blocks = blocks,
                                .out = out.data(),
                                .out_stride = out_stride};
      gram_kernels(*table).product_f32(args);
      for (int i = 0; i < m; ++i)
        for (int c = 0; c < out_stride; ++c) {
          const float found = out[static_cast<size_t>(i * out_stride + c)];
          if (c >= blocks * 16) {
            ASSERT_EQ(found, -1) << i << " " << c;
            continue;
          }
          double sum = 0, magnitude = 0;
          for (int t = 0; t < k; ++t) {
            const double product = double{a[static_cast<size_t>(i * a_stride + t)]} *
                                   double{b[static_cast<size_t>(c / 16 * b_stride + t * 16 + c % 16)]};
            sum += product;
            magnitude += std::fabs(product);
          }
          ASSERT_NEAR(found, sum, k * 0x1p-24 * magnitude + 1e-30) << i << " " << c;
        }
      for (int i = 0; i < m; ++i)
        for (int j = 0; j < blocks; ++j) {
          ProductF32Args one = args;
          one.a += i * a_stride;
          one.m = one.blocks = 1;
          one.b += j * b_stride;
          one.out = alone.data() + i * out_stride + j * 16;
          gram_kernels(*table).product_f32(one);
        }
      ASSERT_EQ(out, alone);
    }
  }
}

// Rounding of 16 rows side by side: the bits of plain arithmetic, number by number, on every table.
TEST(Gram, LanesAreThoseOfPlainArithmetic) {
  constexpr int kColumns = 7, kBlocks = 3, kStride = kColumns * kBlockRows + 5;
  const auto x = random_rows(kBlocks, kStride, 9), start = random_rows(kBlocks, kStride, 10),
             factors = random_rows(1, kColumns, 11);
  std::vector<RoundingLanes> lanes(kBlocks);
  for (int b = 0; b < kBlocks; ++b)
    for (int r = 0; r < kBlockRows; ++r) {
      const float scale = 0.03f + 0.01f * static_cast<float>(r + b);
      lanes[static_cast<size_t>(b)].scale[r] = lanes[static_cast<size_t>(b)].divisor[r] = scale;
      lanes[static_cast<size_t>(b)].min[r] = r % 2 ? 0.25f : 0.0f;
      lanes[static_cast<size_t>(b)].lowest[r] = -8;
      lanes[static_cast<size_t>(b)].highest[r] = 7;
      lanes[static_cast<size_t>(b)].offset[r] = 8;
    }
  const auto nearest = [](const RoundingLanes& l, int r, float wanted) {
    return std::nearbyint(std::min(std::max(wanted, l.lowest[r]), l.highest[r]));
  };
  for (const Kernels* table : tables_under_test()) {
    SCOPED_TRACE(table->name);
    const GramKernels& kernels = gram_kernels(*table);
    std::vector<float> sums = start, rest = start;
    std::vector<uint8_t> codes(kBlocks * kBlockRows);
    kernels.add_lanes(factors.data(), kColumns, x.data(), sums.data(), kStride, kBlocks);
    kernels.round({.lanes = lanes.data(),
                   .values = x.data(),
                   .rest = rest.data(),
                   .stride = kStride,
                   .blocks = kBlocks,
                   .codes = codes.data()});
    float error[kBlockRows];
    kernels.scale_error({.lanes = lanes.data(),
                         .scale = lanes[0].scale,
                         .values = x.data(),
                         .weight = factors.data(),
                         .columns = kColumns,
                         .error = error});
    for (int b = 0; b < kBlocks; ++b)
      for (int i = 0; i < kStride; ++i) {
        const size_t at = static_cast<size_t>(b * kStride + i);
        if (i >= kBlockRows) {
          ASSERT_TRUE(sums[at] == start[at] && rest[at] == start[at]) << b << " " << i;
          continue;
        }
        float sum = 0;
        for (int c = 0; c < kColumns; ++c) {
          const float product = factors[static_cast<size_t>(c)] * x[at + static_cast<size_t>(c * kBlockRows)];
          sum += product;
        }
        ASSERT_EQ(sums[at], start[at] + sum) << b << " " << i;
        const RoundingLanes& l = lanes[static_cast<size_t>(b)];
        const float code = nearest(l, i, (x[at] + l.min[i]) / l.divisor[i]), value = code * l.scale[i];
        ASSERT_EQ(codes[static_cast<size_t>(b * kBlockRows + i)], static_cast<uint8_t>(code + 8));
        ASSERT_EQ(rest[at], start[at] - (value - l.min[i])) << b << " " << i;
      }
    for (int r = 0; r < kBlockRows; ++r) {
      float sum = 0;
      for (int c = 0; c < kColumns; ++c) {
        const float value = x[static_cast<size_t>(c * kBlockRows + r)], scale = lanes[0].scale[r];
        const float rounded = nearest(lanes[0], r, value / scale) * scale, off = value - rounded;
        const float weighed = factors[static_cast<size_t>(c)] * off, square = weighed * off;
        sum += square;
      }
      ASSERT_EQ(error[r], sum) << r;
    }
  }
}

}  // namespace
}  // namespace kt::inline kernels
