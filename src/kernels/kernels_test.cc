// Every table x every format x every route x odd shapes, against sums in double over value_at() and the
// activations as packed, so that what is measured is the multiplication alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <numeric>

#include "formats/known_formats.h"
#include "kernels/testing/activations.h"
#include "kernels/testing/matrices.h"
#include "kernels/testing/tables.h"

namespace kt::inline kernels {
namespace {

// A route, and many_s8 also with plain bytes.
struct Way {
  Route route;
  Precision precision = Precision::kDefault;
};
constexpr Way kWays[] = {{Route::kFew},      {Route::kManySpans},
                         {Route::kManyS8},   {Route::kManyS8, Precision::kInt8},
                         {Route::kManyBf16}, {Route::kManyF32}};
constexpr double kUlp = 0x1p-24;  // relative error of one rounding to f32

bool is_exact(const Packing& p) {
  const Layout& layout = kLayouts[p.layout];
  return p.span == p.k_pad && layout.min == Min::kNone && layout.span == SpanLength::kLong;
}
bool is_integer(const Packing& p) { return is_integer(kLayouts[p.layout].code); }

// The weights as numbers.
struct Weights {
  const Matrix& matrix;
  std::vector<double> value;  // [n, k]
  std::vector<double> size;   // [n, k] |code - bias| * |scale| + |min|, or a little more
  explicit Weights(const Matrix& w) : matrix(w), value(w.n * w.k), size(w.n * w.k) {
    const MatrixView view = w.view();
    for (int64_t i = 0; i < w.n * w.k; ++i) {
      value[i] = value_at(view, i / w.k, i % w.k);
      size[i] = std::fabs(value[i]) + 2 * std::fabs(min_at(view, i / w.k, i % w.k));
    }
  }
  double largest_code() const {  // less the bias or a zero point
    const Format& f = matrix.format;
    const int most = (1 << code_bits(f.code)) - 1;
    if (is_grid(f.code)) return grid_of(f.code).largest;
    return f.code == Code::kI8 || f.code == Code::kIq4 ? 128
           : f.min == Min::kZero                       ? std::max(most, 16)
                                                       : std::max(most - f.bias, f.bias);
  }
  // D of panel.inl.h: the largest |value| that scales and mins of columns [k0, k1) allow, over 127.
  double panel_scale(int64_t row, int64_t k0, int64_t k1) const {
    const MatrixView w = matrix.view();
    const int bits = code_bits(w.format.code);
    double lowest = -w.format.bias, highest = (1 << bits) - 1 - w.format.bias;
    if (w.format.code == Code::kI8) lowest = -128, highest = 127;
    if (w.format.code == Code::kIq4) lowest = -127, highest = 113;
    if (is_grid(w.format.code)) highest = grid_of(w.format.code).largest, lowest = -highest;
    double reach = 0;
    for (int64_t k = k0; k < std::min(k1, w.k); ++k) {
      const double scale = scale_at(w, row, k), min = min_at(w, row, k);
      reach = std::max({reach, std::fabs(lowest * scale - min), std::fabs(highest * scale - min)});
    }
    return reach / 127;
  }
};

struct Reference {
  PlainActs acts;
  int m = 0;
  std::vector<double> want, tolerance;  // [m, n]
};

// How far a result may be from the sum in double; T = sum |a| * size, u = 2^-24.
//   few, many_spans, many_s8 of whole rows: the integer sums are exact; their conversion is rounded, then one fma
//     for each scale of the activations and one for each span of the weights (two with a min, whose sum of values
//     is rounded as often) adds a partial sum below T: (fmas + 4) u T. value_at rounds twice: 2 u T.
//   many_s8 of spans: the bounds of panel.inl.h for each weight, 0.76 D |a|, and for what a huge high byte stands
//     for (|code - bias| + 2) / 512 D |a|, and the f32 part as above over sums of |a| * 128 D. Rows
//     whose D is below 2^-118 become zero: 127 D |a|.
//   float few, many_f32: one fma a column, a scale a span: (K + 4) u T. E4M3 times bf16 is exact in f32, and
//   the bf16
//     product rounds after each of a pair: the same.
//   many_bf16: the weight is rounded to 8 bits, 2^-8 of it, unless it is bf16 already; products are exact,
//   and the
//     hardware may truncate where it adds: 4 u K T.
//   Where numbers leave the normal range: 2^-150 for each of K terms, times integers up to 2^15; bf16
//   products flush.
double tolerance_of(const Packing& p, Route route, const ActShape& acts, double size, double panel_error,
                    double panel_size, double amax) {
  const double k = static_cast<double>(p.k);
  const double tiny = k * std::max(1.0, amax) * (acts.code == ActCode::kBf16 ? 0x1p-124 : 0x1p-134);
  const bool integer = is_integer(p);
  if (route == Route::kManyBf16)
    return tiny + size * (4 * kUlp * k + (p.format.code == Code::kBf16 ? 0 : 0x1.01p-8));
  if (route == Route::kManyF32 || !integer) return tiny + size * kUlp * (k + 4);
  if (route == Route::kManyS8 && is_exact(p)) return tiny + size * kUlp * 7;
  if (route == Route::kManyS8) {
    const double panels = std::ceil(k / acts.sum_span);
    return tiny + panel_error + panel_size * kUlp * (panels + 4) + size * 2 * kUlp;
  }
  const double fmas = std::ceil(k / kActSpan) +
                      std::ceil(k / std::min(p.span, kExactK)) * (p.format.min == Min::kNone ? 1 : 2);
  return tiny + size * kUlp * (fmas + 6);
}

Reference reference(const Weights& w, const Packing& p, Route route, const ActShape& shape,
                    const std::vector<float>& rows, int m) {
  Reference out;
  out.m = m;
  out.acts = plain_acts(shape, rows, m, p.k);
  const int64_t n = p.n, k = p.k;
  const int64_t panel = shape.sum_span, panels = (k + panel - 1) / panel;  // of many_s8
  std::vector<double> a(m * k), amax(m), panel_sum(m * panels), near_sum(m * panels), far_sum(m * panels);
  for (int i = 0; i < m; ++i)
    for (int64_t c = 0; c < k; ++c) {
      a[i * k + c] = out.acts.value(i, static_cast<int>(c));
      amax[i] = std::max(amax[i], std::fabs(a[i * k + c]));
      panel_sum[i * panels + c / panel] += std::fabs(a[i * k + c]);
      const double huge = shape.by_row ? out.acts.huge_value(i, static_cast<int>(c)) : 0;
      near_sum[i * panels + c / panel] += std::fabs(a[i * k + c] - huge);
      far_sum[i * panels + c / panel] += std::fabs(huge);
    }
  const bool rounded = route == Route::kManyS8 && is_integer(p) && !is_exact(p);
  for (int64_t r = 0; r < n; ++r) {
    std::vector<double> d;
    if (rounded)
      for (int64_t c = 0; c < k; c += panel) d.push_back(w.panel_scale(r, c, c + panel));
    for (int i = 0; i < m; ++i) {
      double sum = 0, size = 0, panel_error = 0, panel_size = 0;
      for (int64_t c = 0; c < k; ++c) {
        sum += a[i * k + c] * w.value[r * k + c];
        size += std::fabs(a[i * k + c]) * w.size[r * k + c];
      }
      for (size_t j = 0; j < d.size(); ++j) {
        const size_t at = i * d.size() + j;
        panel_error +=
            d[j] * (d[j] < 0x1.001p-118 ? 128 * panel_sum[at]
                                        : 0.76 * near_sum[at] + (w.largest_code() + 2) / 512 * far_sum[at]);
        panel_size += panel_sum[i * d.size() + j] * d[j] * 128;
      }
      out.want.push_back(sum);
      out.tolerance.push_back(tolerance_of(p, route, shape, size, panel_error, panel_size, amax[i]));
    }
  }
  // [n, m] to [m, n]
  std::vector<double> want(m * n), tolerance(m * n);
  for (int64_t r = 0; r < n; ++r)
    for (int i = 0; i < m; ++i)
      want[i * n + r] = out.want[r * m + i], tolerance[i * n + r] = out.tolerance[r * m + i];
  out.want.swap(want);
  out.tolerance.swap(tolerance);
  return out;
}

// Runs one route on m of `rows` [*, k]; an empty result where the table has no such kernel. [m, 16 * blocks]
std::vector<float> multiply(const Kernels& t, const Packed& w, Way way, const std::vector<float>& rows, int m,
                            const int32_t* index = nullptr) {
  const Packing& p = w.packing;
  const Plan plan = plan_route(t, p, way.route, m, way.precision);
  if (!plan.multiply) return {};
  const int64_t columns = p.blocks * kBlockRows, ld = columns + 16;
  Guarded acts_memory(act_bytes(plan.acts)), scratch(plan.scratch_bytes),
      out((m * ld - 16) * sizeof(float), 16);
  const Acts acts = acts_in(plan.acts, acts_memory.as());
  t.pack_acts({.source = rows.data(),
               .type = Real::kF32,
               .stride = p.k,
               .index = index,
               .m = m,
               .k = static_cast<int>(p.k),
               .out = acts});
  std::fill_n(out.as<float>(), m * ld - 16, std::numeric_limits<float>::quiet_NaN());
  plan.multiply({.packing = &p,
                 .blocks = w.memory.as(),
                 .count = static_cast<int>(p.blocks),
                 .acts = acts,
                 .m = m,
                 .out = out.as<float>(),
                 .ld = ld,
                 .scratch = scratch.as()});
  EXPECT_TRUE(acts_memory.intact() && scratch.intact() && out.intact()) << "wrote outside its memory";
  std::vector<float> result;
  for (int i = 0; i < m; ++i) {
    result.insert(result.end(), out.as<float>() + i * ld, out.as<float>() + i * ld + columns);
    for (int64_t c = columns; c < ld && i + 1 < m; ++c)
      EXPECT_TRUE(std::isnan(out.as<float>()[i * ld + c])) << "wrote past a row";
  }
  return result;
}

testing::AssertionResult close(const std::vector<float>& have, const Packing& p, const Reference& want,
                               int m) {
  const int64_t ld = p.blocks * kBlockRows;
  for (int i = 0; i < m; ++i)
    for (int64_t r = 0; r < ld; ++r) {
      const double expected = r < p.n ? want.want[i * p.n + r] : 0,
                   tolerance = r < p.n ? want.tolerance[i * p.n + r] : 0;
      const double error = std::fabs(have[i * ld + r] - expected);
      if (!(error <= tolerance))
        return testing::AssertionFailure()
               << "token " << i << ", row " << r << ": " << have[i * ld + r] << " for " << expected
               << ", off by " << error << ", " << tolerance << " allowed";
    }
  return testing::AssertionSuccess();
}

testing::AssertionResult same_bits(const std::vector<float>& have, const std::vector<float>& want) {
  for (size_t i = 0; i < std::min(have.size(), want.size()); ++i)
    if (std::bit_cast<uint32_t>(have[i]) != std::bit_cast<uint32_t>(want[i]))
      return testing::AssertionFailure() << "element " << i << ": " << have[i] << " for " << want[i];
  return testing::AssertionSuccess();
}

struct Tokens {
  std::vector<int> few, many;
};
Tokens usual_tokens() {
  if (full_tests()) return {{1, 2, 3, 5, 8, 11}, {1, 2, 3, 5, 16, 33, 128}};
  return {{1, 2, 3, 8}, {1, 5, 33}};
}

// Whatever can be asked of one matrix and one set of activations [max of tokens, k].
void check_matrix(const Matrix& matrix, const std::vector<float>& rows, const Tokens& tokens) {
  const Weights weights(matrix);
  std::map<int, std::unique_ptr<Packed>> packed;  // by step_bytes
  for (const Kernels* t : tables_under_test()) {
    auto& at = packed[t->fragment.step_bytes];
    if (!at) at = std::make_unique<Packed>(matrix.view(), t->fragment);
  }
  std::vector<float> few_of_rows;  // of the largest m, to compare many_spans with
  for (const Way& way : kWays) {
    const Route route = way.route;
    const Packing& p = packed[tables_under_test()[0]->fragment.step_bytes]->packing;
    const bool integer = is_integer(p);
    if ((route == Route::kManyS8 || route == Route::kManySpans) && !integer) continue;
    const auto& ms = route == Route::kFew ? tokens.few : tokens.many;
    const int most = *std::max_element(ms.begin(), ms.end());
    std::map<ActCode, Reference> wants;  // tables differ in the activations they take
    // Integers add up the same in any order, and many_f32 adds columns one by one everywhere.
    const bool equal_everywhere = route == Route::kManyF32 || (integer && route != Route::kManyBf16);
    std::vector<float> first;
    for (const Kernels* t : tables_under_test())
      for (auto m = ms.rbegin(); m != ms.rend(); ++m) {
        const Packed& w = *packed[t->fragment.step_bytes];
        const std::vector<float> have = multiply(*t, w, way, rows, *m);
        if (have.empty()) continue;
        const ActShape shape = plan_route(*t, p, route, most, way.precision).acts;
        Reference& want = wants[shape.code];
        if (!want.m) want = reference(weights, p, route, shape, rows, most);
        const std::string what = std::string(t->name) + " " +
                                 plan_route(*t, p, route, *m, way.precision).describe() + ", " +
                                 std::to_string(*m) + " tokens, " + p.describe();
        EXPECT_TRUE(close(have, p, want, *m)) << what;
        if (first.empty()) first = have;
        if (equal_everywhere) {
          EXPECT_TRUE(same_bits(have, first)) << what << ", against portable";
        }
        if (route == Route::kFew && integer && few_of_rows.empty()) few_of_rows = have;
        if (route == Route::kManySpans) {
          EXPECT_TRUE(same_bits(have, few_of_rows)) << what << ", against few";
        }
        EXPECT_TRUE(w.memory.intact());
        if (testing::Test::HasFailure()) return;  // one sentence tells more than a thousand
      }
  }
}

class Multiply : public testing::TestWithParam<NamedFormat> {
 protected:
  static void check(const Matrix& w, uint32_t seed) {
    const Tokens tokens = usual_tokens();
    check_matrix(w, random_rows(128, w.k, seed), tokens);
  }
};
INSTANTIATE_TEST_SUITE_P(, Multiply, testing::ValuesIn(kFormats),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Multiply, OddShapes) {
  const Format& format = GetParam().format;
  std::vector<std::pair<int64_t, int64_t>> shapes = {{17, 96}, {130, 776}, {1, 1100}};
  if (full_tests()) {
    shapes.clear();
    for (const int64_t n : {1, 17, 48, 130})
      for (const int64_t k : {1, 64, 96, 130, 256, 776, 1100, 2100}) shapes.emplace_back(n, k);
  }
  int64_t last = 0;
  for (const auto& [n, k] : shapes) {
    const int64_t columns = fitting_columns(format, k);
    if (columns * 1000 + n == last) continue;
    last = columns * 1000 + n;
    check(random_matrix(format, n, columns, static_cast<uint32_t>(n * 10000 + k)), static_cast<uint32_t>(k));
  }
}

// Row i of the activations is column i alone, so that every weight is held to the bound of one weight: sums
// would hide errors that cancel.
TEST_P(Multiply, OneColumnAtATime) {
  const Format& format = GetParam().format;
  const Matrix w = random_matrix(format, 17, fitting_columns(format, 130), 17);
  std::vector<float> rows(w.k * w.k);
  for (int64_t i = 0; i < w.k; ++i) rows[i * w.k + i] = i % 3 ? 1.0f : -2.5f;
  const int all = static_cast<int>(w.k);
  check_matrix(w, rows, {{all}, {all}});
}

// A row gives the same bits alone and in a batch, bit for bit on integer formats.
TEST_P(Multiply, FewIsBatchInvariant) {
  const Format& format = GetParam().format;
  if (!is_integer(format.code)) return;
  const Matrix w = random_matrix(format, 33, fitting_columns(format, 200), 7);
  constexpr int kMost = 13;
  const std::vector<float> rows = random_rows(kMost, w.k, 8);
  for (const Kernels* t : tables_under_test()) {
    const Packed packed(w.view(), t->fragment);
    const size_t ld = static_cast<size_t>(packed.packing.blocks) * kBlockRows;
    std::vector<float> alone;
    for (int32_t i = 0; i < kMost; ++i) {
      const auto one = multiply(*t, packed, {Route::kFew}, rows, 1, &i);
      alone.insert(alone.end(), one.begin(), one.begin() + ld);
    }
    for (const int m : {2, 3, 4, 5, 7, 8, 9, kMost})
      EXPECT_TRUE(same_bits(multiply(*t, packed, {Route::kFew}, rows, m), alone))
          << t->name << ", " << m << " tokens";
  }
}

// Scales at the ends of their types: denormal, tiny, huge, all negative; E8M0 0 is among the denormal ones.
TEST_P(Multiply, ExtremeScales) {
  const Format& format = GetParam().format;
  for (const Scales kind : {Scales::kDenormal, Scales::kTiny, Scales::kHuge, Scales::kNegative}) {
    SCOPED_TRACE(static_cast<int>(kind));
    const Matrix w = random_matrix(format, 17, fitting_columns(format, 160), 11, kind);
    check_matrix(w, random_rows(5, w.k, 12), {{1, 5}, {3}});
  }
}

// Rows of an entry that no other of the grid exceeds in sum, as LargestCodes wants its codes.
void largest_entries(Matrix& w) {
  const Code code = w.format.code;
  const int numbers = grid_of(code).numbers;
  std::vector<uint8_t> best(static_cast<size_t>(numbers)), entry(best.size());
  int most = 0;
  for (int i = 0; i < 1 << grid_index_bits(code); ++i) {
    look_up(code, i, entry.data());
    const int sum = std::accumulate(entry.begin(), entry.end(), 0);
    if (sum > most) most = sum, best = entry;
  }
  for (int64_t row = 0; row < 4; ++row)
    for (int64_t c = 0; c < w.k; ++c) {
      const bool negative = grid_of(code).signs && (row == 1 || (row == 2 && c % 2));
      const uint8_t positive = best[static_cast<size_t>(c % numbers)];
      w.codes[static_cast<size_t>(row * w.k + c)] = negative ? negated_code(positive) : positive;
    }
}

// Activations at 127 against the largest codes of either sign, over a long row: nothing overflows. The same
// row with alternating signs, a row of zeros, a row of one value, and a row with a single value.
TEST_P(Multiply, LargestCodes) {
  const Format& format = GetParam().format;
  const int64_t k = full_tests() ? 7168 : 2048;
  Matrix w = random_matrix(format, 5, k, 13);
  std::vector<float> rows(5 * k);
  for (int64_t c = 0; c < k; ++c) {
    rows[c] = 1;
    rows[k + c] = c % 2 ? -1.0f : 1.0f;
    rows[3 * k + c] = -0.37f;
  }
  rows[4 * k + k - 1] = 5;
  const int bits = code_bits(format.code);
  if (is_grid(format.code)) {
    largest_entries(w);
  } else if (bits <= 8) {
    const uint8_t top = format.code == Code::kI8     ? 127
                        : format.code == Code::kE4m3 ? 0x7E
                                                     : static_cast<uint8_t>((1 << bits) - 1);
    const uint8_t bottom = format.code == Code::kI8 ? 0x80 : format.code == Code::kE4m3 ? 0xFE : 0;
    for (int64_t c = 0; c < k; ++c) {
      w.codes[c] = top;
      w.codes[k + c] = bottom;
      w.codes[2 * k + c] = c % 2 ? bottom : top;
      w.codes[3 * k + c] = 1;
    }
  }
  check_matrix(w, rows, {{5}, {5}});
}

// Channels that are hundreds of times their neighbours, other ones in every row, and K blocks of rounded panels: what
// many_s8 makes of them must be as good as what it makes of their neighbours.
TEST_P(Multiply, Outliers) {
  const Format& format = GetParam().format;
  const Matrix w = random_matrix(format, 50, fitting_columns(format, 2100), 18);
  std::vector<float> rows = random_rows(37, w.k, 19);
  for (int64_t i = 0; i < 37; ++i)
    for (const int64_t c : {i * 31, 700 + i, 2099 - i % 2}) rows[i * w.k + c] = c % 2 ? 400.0f : -900.0f;
  check_matrix(w, rows, {{3}, {1, 37}});
}

// Matrices of zeros, from quantise where it makes them: zero scales.
TEST_P(Multiply, ZeroWeights) {
  const Format& format = GetParam().format;
  const int64_t k = fitting_columns(format, 96);
  Matrix w = random_matrix(format, 3, k, 20);
  if (can_round_to(format))
    w = quantise(format, std::vector<float>(3 * k), 3, k);
  else
    std::fill(w.supers.begin(), w.supers.end(), uint8_t{0});
  check_matrix(w, random_rows(3, k, 14), {{3}, {3}});
}

// More rows than `many` keeps sums for at once, and more columns than a panel.
TEST(MultiplyLarge, ManyRows) {
  for (const char* name : {"int8", "int4_g32", "q4_k", "fp8"}) {
    const Matrix w = random_matrix(format_named(name), 80, full_tests() ? 1280 : 768, 15);
    check_matrix(w, random_rows(kManyRows + 37, w.k, 16), {{1}, {kManyRows + 37}});
  }
}

}  // namespace
}  // namespace kt::inline kernels
