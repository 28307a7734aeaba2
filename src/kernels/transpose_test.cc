// Kernels of backward passes, every table: transposed panels of every format against packed_value() and against
// what the products of the other tables make of the same weights, products with them, and sums of outer products.
#include "kernels/transpose.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <map>
#include <memory>

#include "base/checked.h"
#include "kernels/testing/activations.h"
#include "kernels/testing/matrices.h"
#include "kernels/testing/tables.h"

namespace kt::inline kernels {
namespace {

// A code of panels, and the route that multiplies it.
struct PanelKind {
  const char* format;
  Route route;
  void (*BackKernels::*transpose)(const TransposeArgs&) noexcept;
};
constexpr PanelKind kKinds[] = {{"f32", Route::kManyF32, &BackKernels::transpose_f32},
                                {"bf16", Route::kManyBf16, &BackKernels::transpose_bf16}};

// The transpose of row blocks of W, [columns of W to whole chunks, their rows], as a packed plain matrix.
struct Transposed {
  Packing packing;
  Guarded memory;
  Transposed(const Kernels& table, const PanelKind& kind, int64_t columns, int64_t blocks)
      : packing(packing_for(format_named(kind.format), round_up(columns, int64_t{kChunk}),
                            blocks * kBlockRows, table.fragment, "panels")),
        memory(packing.bytes()) {
    std::memset(memory.as(), 0x5A, memory.size());
  }
  // Panel by panel; `args` says what of W.
  void fill(const Kernels& table, const PanelKind& kind, TransposeArgs args) const {
    args.out_stride = static_cast<int64_t>(packing.block_bytes);
    for (args.first = 0; args.first < packing.n; args.first += kChunk) {
      args.out = memory.as() + args.first / kBlockRows * args.out_stride;
      (back_kernels(table).*kind.transpose)(args);
    }
    EXPECT_TRUE(memory.intact()) << "wrote outside the panels";
  }
  // [packing.n, packing.k]
  std::vector<float> values() const {
    Matrix plain(unpacked_format(packing), packing.n, packing.k);
    std::vector<float> out;
    for (int64_t b = 0; b < packing.blocks; ++b) {
      Matrix block(plain.format, kBlockRows, packing.k);
      unpack_block(packing, memory.as() + static_cast<size_t>(b) * packing.block_bytes, kBlockRows, 0, block);
      for (int64_t i = 0; i < kBlockRows * packing.k; ++i)
        out.push_back(value_at(block.view(), i / packing.k, i % packing.k));
    }
    return out;
  }
};

bool equal_bits(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

// How far widening to bf16 may be from a weight. Integer codes are taken from 2^8 + code by one fma (widen_codes),
// which starts from (2^8 + bias) * scale + min, rounded twice: 2 * 384 * 2^-24 of the scale. Then 8 bits are kept:
// 2^-8 of it.
double bf16_error(const MatrixView& w, int64_t row, int64_t column, double value) {
  const double start = 0x1p-14 * std::fabs(double{scale_at(w, row, column)}) +
                       0x1p-23 * std::fabs(double{min_at(w, row, column)});
  return start + 0x1p-8 * (std::fabs(value) + start);
}

// values [columns, rows] of panels against the numbers [rows, columns] that packed weights stand for.
void check_values(const std::vector<float>& values, const std::vector<float>& want, const Matrix& w,
                  bool bf16, int64_t rows) {
  const bool exact = !is_integer(w.format.code);
  for (int64_t c = 0; c < w.k; ++c)
    for (int64_t r = 0; r < rows; ++r) {
      const float found = values[static_cast<size_t>(c * rows + r)];
      if (r >= w.n) {
        ASSERT_EQ(found, 0) << "padding row " << r << ", column " << c;
        continue;
      }
      const float value = want[static_cast<size_t>(r * w.k + c)];
      if (!bf16 || exact)
        ASSERT_TRUE(equal_bits(found, bf16 ? to_f32(to_bf16(value)) : value))
            << "row " << r << ", column " << c << ": " << found << " for " << value;
      else
        ASSERT_NEAR(found, value, bf16_error(w.view(), r, c, value)) << "row " << r << ", column " << c;
    }
}

// Row blocks of W in any arrangement of calls: the bytes are those of one call.
void check_calls(const Kernels& table, const PanelKind& kind, const Packed& w, const Transposed& whole) {
  const Packing& p = w.packing;
  const int blocks = static_cast<int>(p.blocks), half = blocks / 2;
  const auto same = [&](const Transposed& other) {
    return std::memcmp(other.memory.as(), whole.memory.as(), whole.memory.size()) == 0;
  };
  const Transposed parts(table, kind, p.k, p.blocks);
  TransposeArgs args{.packing = &p, .blocks = w.memory.as()};
  for (const bool second : {true, false}) {  // the later rows first: neither call writes the other's
    args.row = second ? half * kBlockRows : 0;
    args.blocks = w.memory.as() + static_cast<size_t>(second ? half : 0) * p.block_bytes;
    args.count = second ? blocks - half : half;
    args.last = second;
    parts.fill(table, kind, args);
  }
  EXPECT_TRUE(same(parts)) << "in two calls";

  Guarded beside(2 * p.bytes());  // every block has another one after it
  for (int b = 0; b < 2 * blocks; ++b)
    std::memcpy(beside.as() + static_cast<size_t>(b) * p.block_bytes,
                w.memory.as() + static_cast<size_t>(b / 2) * p.block_bytes, p.block_bytes);
  const Transposed apart(table, kind, p.k, p.blocks);
  apart.fill(table, kind,
             {.packing = &p,
              .blocks = beside.as(),
              .stride = static_cast<int64_t>(2 * p.block_bytes),
              .count = blocks});
  EXPECT_TRUE(same(apart)) << "of interleaved blocks";
}

class Transpose : public testing::TestWithParam<NamedFormat> {};
INSTANTIATE_TEST_SUITE_P(, Transpose, testing::ValuesIn(kFormats),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Transpose, OddShapes) {
  const Format& format = GetParam().format;
  for (const auto& [n, columns] : {std::pair<int64_t, int64_t>{1, 1}, {17, 96}, {50, 300}, {100, 70}}) {
    const int64_t k = fitting_columns(format, columns);
    const Matrix matrix = random_matrix(format, n, k, static_cast<uint32_t>(n + 3 * columns));
    std::map<int, std::unique_ptr<Packed>> packed;  // by step_bytes
    std::vector<float> want;
    for (const Kernels* table : tables_under_test()) {
      auto& w = packed[table->fragment.step_bytes];
      if (!w) {
        w = std::make_unique<Packed>(matrix.view(), table->fragment);
        for (int64_t i = 0; i < n * k && want.size() < static_cast<size_t>(n * k); ++i)
          want.push_back(packed_value(w->packing, w->memory.as(), i / k, i % k));
      }
      for (const PanelKind& kind : kKinds) {
        if (!(back_kernels(*table).*kind.transpose)) continue;
        SCOPED_TRACE(testing::Message()
                     << table->name << ", " << kind.format << " panels of " << n << " x " << k);
        const Transposed panels(*table, kind, k, w->packing.blocks);
        panels.fill(
            *table, kind,
            {.packing = &w->packing, .blocks = w->memory.as(), .count = static_cast<int>(w->packing.blocks)});
        // Rows past the last block, up to a whole chunk, are zeros: bytes that no value shows.
        const auto* end = panels.memory.as<uint8_t>();
        const size_t row_bytes = panels.packing.block_bytes / static_cast<size_t>(panels.packing.k_pad);
        for (int64_t c = 0; c < panels.packing.blocks; ++c, end += panels.packing.block_bytes)
          for (size_t i = static_cast<size_t>(panels.packing.k) * row_bytes; i < panels.packing.block_bytes;
               ++i)
            ASSERT_EQ(end[i], 0) << "byte " << i << " of block " << c;
        check_values(panels.values(), want, matrix, kind.route == Route::kManyBf16, panels.packing.k);
        check_calls(*table, kind, *w, panels);
        if (HasFailure()) return;
      }
    }
  }
}

// m rows [m, rows of W] times panels, [m, columns of W to whole chunks].
std::vector<float> product_of(const Kernels& table, const Packing& packing, const std::byte* blocks,
                              Route route, const std::vector<float>& rows, int m) {
  const Plan plan = plan_route(table, packing, route, m);
  const int64_t ld = packing.blocks * kBlockRows;
  Guarded memory(act_bytes(plan.acts)), scratch(plan.scratch_bytes);
  const Acts acts = acts_in(plan.acts, memory.as());
  const auto k = static_cast<int64_t>(rows.size()) / m;
  table.pack_acts({.source = rows.data(),
                   .type = Real::kF32,
                   .stride = k,
                   .m = m,
                   .k = static_cast<int>(k),
                   .out = acts});
  std::vector<float> out(static_cast<size_t>(m * ld), NAN);
  plan.multiply({.packing = &packing,
                 .blocks = blocks,
                 .count = static_cast<int>(packing.blocks),
                 .acts = acts,
                 .m = m,
                 .out = out.data(),
                 .ld = ld,
                 .scratch = scratch.as()});
  return out;
}

// Rows that are 1 in one column read weights as a product has them: panels hold the same bits (0 times any of them adds
// nothing; a sum that starts from +0 makes +0 of -0).
TEST_P(Transpose, HoldsWhatProductsMultiply) {
  const Format& format = GetParam().format;
  const int64_t n = 20, k = fitting_columns(format, 96);
  const Matrix matrix = random_matrix(format, n, k, 5);
  std::vector<float> ones(static_cast<size_t>(k * k));
  for (int64_t i = 0; i < k; ++i) ones[static_cast<size_t>(i * k + i)] = 1;
  for (const Kernels* table : tables_under_test()) {
    const Packed w(matrix.view(), table->fragment);
    for (const PanelKind& kind : kKinds) {
      if (!(back_kernels(*table).*kind.transpose)) continue;
      SCOPED_TRACE(testing::Message() << table->name << ", " << kind.format << " panels");
      const Transposed panels(*table, kind, k, w.packing.blocks);
      panels.fill(
          *table, kind,
          {.packing = &w.packing, .blocks = w.memory.as(), .count = static_cast<int>(w.packing.blocks)});
      const auto values = panels.values(),
                 want = product_of(*table, w.packing, w.memory.as(), kind.route, ones, static_cast<int>(k));
      const int64_t rows = w.packing.blocks * kBlockRows;
      for (int64_t c = 0; c < k; ++c)
        for (int64_t r = 0; r < n; ++r)
          ASSERT_TRUE(equal_bits(values[static_cast<size_t>(c * rows + r)] + 0.0f,
                                 want[static_cast<size_t>(c * rows + r)]))
              << "row " << r << ", column " << c;
    }
  }
}

// dX = dY W, against sums in double over the weights themselves. bf16: two roundings to 8 bits for each product,
// each of up to 2^-8 and about 2^-9 on average; errors of a sum add up like its terms.
TEST_P(Transpose, MultipliesBackwards) {
  const Format& format = GetParam().format;
  constexpr int kRows = 37;
  const int64_t n = 75, k = fitting_columns(format, 130);
  const Matrix matrix = random_matrix(format, n, k, 6);
  const auto dy = random_rows(kRows, n, 7);
  std::vector<double> want(static_cast<size_t>(kRows * k));
  for (int64_t r = 0; r < n; ++r)
    for (int64_t c = 0; c < k; ++c) {
      const double value = value_at(matrix.view(), r, c);
      for (int64_t i = 0; i < kRows; ++i)
        want[static_cast<size_t>(i * k + c)] += double{dy[static_cast<size_t>(i * n + r)]} * value;
    }
  for (const Kernels* table : tables_under_test()) {
    const Packed w(matrix.view(), table->fragment);
    for (const PanelKind& kind : kKinds) {
      if (!(back_kernels(*table).*kind.transpose)) continue;
      const Transposed panels(*table, kind, k, w.packing.blocks);
      panels.fill(
          *table, kind,
          {.packing = &w.packing, .blocks = w.memory.as(), .count = static_cast<int>(w.packing.blocks)});
      const auto found = product_of(*table, panels.packing, panels.memory.as(), kind.route, dy, kRows);
      double error = 0, size = 0;
      for (int64_t i = 0; i < kRows; ++i)
        for (int64_t c = 0; c < k; ++c) {
          const double wanted = want[static_cast<size_t>(i * k + c)];
          error += std::pow(double{found[static_cast<size_t>(i * panels.packing.n + c)]} - wanted, 2);
          size += wanted * wanted;
        }
      EXPECT_LE(std::sqrt(error / size), kind.route == Route::kManyF32 ? 5e-6 : 6e-3)
          << table->name << ", " << kind.format << " panels";
    }
  }
}

size_t bytes_of_one(Real type) { return type == Real::kF32 ? 4 : 2; }

// b in a type, where a read past its end faults.
struct Wide {
  Real type;
  Guarded memory;
  std::vector<float> values;
  Wide(Real type_of, const std::vector<float>& x)
      : type(type_of), memory(x.size() * bytes_of_one(type_of), bytes_of_one(type_of)), values(x) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (type == Real::kF32) {
        std::memcpy(memory.as() + i * 4, &x[i], 4);
        continue;
      }
      const uint16_t bits = type == Real::kBf16 ? to_bf16(x[i]).bits : to_f16(x[i]).bits;
      std::memcpy(memory.as() + i * 2, &bits, 2);
      values[i] = type == Real::kBf16 ? to_f32(to_bf16(x[i])) : to_f32(to_f16(x[i]));
    }
  }
};

// Numbers of any type, in rows that an index names or across, as row blocks: to the bit what rounding makes of them,
// zeros to the end of the last block and of K, and nothing beside.
TEST(PackPanel, HoldsWhatItIsGiven) {
  struct Case {
    int rows, columns;
    bool index, across;
  };
  constexpr Case kCases[] = {{1, 1, false, false},  {37, 50, true, false}, {64, 16, false, false},
                             {9, 100, true, false}, {8, 40, false, true},  {75, 33, false, true},
                             {3, 5, false, true}};
  int checked = 0;
  for (const Kernels* table : tables_under_test()) {
    if (!back_kernels(*table).pack_panel) continue;
    for (const Case& at : kCases)
      for (const Real type : {Real::kF32, Real::kBf16, Real::kF16}) {
        if (at.across && type != Real::kF32) continue;
        SCOPED_TRACE(testing::Message() << table->name << ", " << at.rows << " x " << at.columns);
        const int64_t source_rows = at.across ? at.columns : at.rows + 5,
                      ld = (at.across ? at.rows : at.columns) + 3;
        // the last row ends where memory does
        std::vector<float> numbers = random_rows(source_rows, ld, 11);
        numbers.resize(numbers.size() - 3);
        const Wide from(type, numbers);
        std::vector<int32_t> index;
        for (int r = 0; r < at.rows; ++r) index.push_back(static_cast<int32_t>((r * 7 + 2) % source_rows));
        const Packing p = packing_for(format_named("bf16"), at.columns, at.rows, table->fragment, "panel");
        Guarded memory(p.bytes());
        std::memset(memory.as(), 0x5A, memory.size());
        back_kernels(*table).pack_panel({.from = from.memory.as(),
                                         .type = type,
                                         .ld = ld,
                                         .index = at.index ? index.data() : nullptr,
                                         .across = at.across,
                                         .rows = at.rows,
                                         .columns = at.columns,
                                         .k_pad = p.k_pad,
                                         .out = memory.as(),
                                         .out_stride = static_cast<int64_t>(p.block_bytes)});
        EXPECT_TRUE(memory.intact());
        for (int64_t c = 0; c < p.blocks * kBlockRows; ++c)
          for (int64_t r = 0; r < p.k_pad; ++r) {
            float want = 0;
            if (c < at.columns && r < at.rows)
              want = from.values[static_cast<size_t>(at.across ? c * ld + r
                                                               : (at.index ? index[r] : r) * ld + c)];
            ASSERT_TRUE(equal_bits(packed_value(p, memory.as(), c, r), to_f32(to_bf16(want))))
                << r << ", " << c;
          }
        ++checked;
      }
  }
  if (!checked) GTEST_SKIP() << "no table that multiplies bf16 runs here";
}

struct OuterCase {
  int rows, a_columns, b_columns;
  bool index, strided;
};

// The same bits as one fma after the other, whatever the table; untouched beside; and the sums are sums: rows + 2
// roundings of no more than the sum of the magnitudes.
void check_outer_sum(const Kernels& table, const OuterCase& at, const Wide& b, int64_t source_rows) {
  const int64_t a_ld = at.a_columns + 3, b_ld = static_cast<int64_t>(b.values.size()) / source_rows;
  const auto a = random_rows(at.rows, a_ld, 9);
  std::vector<int32_t> index;
  for (int t = 0; t < at.rows; ++t) index.push_back(static_cast<int32_t>((t * 7 + 2) % source_rows));
  const int64_t step = at.strided ? at.a_columns + 1 : 1, ld = at.strided ? 1 : at.b_columns + 2;
  const auto start = random_rows(1, int64_t{at.a_columns + 1} * (at.b_columns + 2), 10);
  std::vector<float> out = start, want = start;
  OuterSumArgs args{.a = a.data(),
                    .a_ld = a_ld,
                    .a_columns = at.a_columns,
                    .b = b.memory.as(),
                    .b_type = b.type,
                    .b_ld = b_ld,
                    .b_columns = at.b_columns,
                    .index = at.index ? index.data() : nullptr,
                    .rows = at.rows,
                    .factor = -0.37f,
                    .out = out.data(),
                    .out_ld = ld,
                    .out_step = step};
  back_kernels(table).outer_sum(args);
  for (int i = 0; i < at.a_columns; ++i)
    for (int c = 0; c < at.b_columns; ++c) {
      float sum = 0;
      double exact = 0, magnitude = 0;
      for (int t = 0; t < at.rows; ++t) {
        const float x = a[static_cast<size_t>(t * a_ld + i)];
        const float y =
            b.values[static_cast<size_t>((at.index ? index[static_cast<size_t>(t)] : t) * b_ld + c)];
        sum = std::fmaf(y, x, sum);
        exact += double{x} * double{y};
        magnitude += std::fabs(double{x} * double{y});
      }
      float& to = want[static_cast<size_t>(i * ld + c * step)];
      exact = double{to} + double{args.factor} * exact;
      magnitude = std::fabs(double{to}) + std::fabs(double{args.factor}) * magnitude;
      to = std::fmaf(sum, args.factor, to);
      ASSERT_NEAR(to, exact, (at.rows + 2) * 0x1p-24 * magnitude) << i << " " << c;
    }
  for (size_t i = 0; i < out.size(); ++i)
    ASSERT_TRUE(equal_bits(out[i], want[i])) << "element " << i << ": " << out[i] << " for " << want[i];

  std::vector<float> cut = start;  // in columns, in another order
  const int middle = at.b_columns / 3;
  args.b = b.memory.as() + static_cast<size_t>(middle) * bytes_of_one(b.type);
  args.b_columns = at.b_columns - middle;
  args.out = cut.data() + middle * step;
  back_kernels(table).outer_sum(args);
  args.b = b.memory.as();
  args.b_columns = middle;
  args.out = cut.data();
  back_kernels(table).outer_sum(args);
  ASSERT_EQ(cut, out) << "cut at column " << middle;
}

TEST(OuterSum, SameBitsEverywhere) {
  constexpr OuterCase kCases[] = {{0, 4, 16, false, false},  {1, 1, 1, false, false},
                                  {1, 4, 64, true, true},    {3, 8, 15, false, true},
                                  {37, 5, 17, true, false},  {64, 8, 130, false, true},
                                  {33, 16, 100, true, true}, {130, 7, 64, false, false}};
  for (const Kernels* table : tables_under_test())
    for (const Real type : {Real::kF32, Real::kBf16, Real::kF16})
      for (const OuterCase& at : kCases) {
        SCOPED_TRACE(testing::Message() << table->name << ", " << at.rows << " rows of " << at.a_columns
                                        << " by " << at.b_columns << " of type " << static_cast<int>(type));
        const int source_rows = at.rows + 1;
        check_outer_sum(*table, at, Wide(type, random_rows(source_rows, at.b_columns, 8)), source_rows);
        if (HasFailure()) return;
      }
}

}  // namespace
}  // namespace kt::inline kernels
