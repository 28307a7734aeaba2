// Attention over blocks of keys, every table against a double-precision softmax over all keys at once.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/testing/activations.h"
#include "kernels/testing/guarded.h"
#include "kernels/testing/tables.h"

namespace kt {
namespace {

size_t size_of(Real type) { return type == Real::kF32 ? 4 : 2; }

// Puts x as `type` and returns the number it became.
float put(Real type, std::byte* at, float x) {
  if (type == Real::kF32) {
    std::memcpy(at, &x, 4);
    return x;
  }
  const uint16_t bits = type == Real::kBf16 ? to_bf16(x).bits : to_f16(x).bits;
  std::memcpy(at, &bits, 2);
  return type == Real::kBf16 ? to_f32(bf16{bits}) : to_f32(f16{bits});
}

struct Case {
  int rows, keys, d, dv, block;
  Real type;
  int window;  // keys a row sees at most; 0: all up to its own place
};

// Row r stands at key keys - rows + r and sees keys up to there.
void check(const Kernels& t, const Case& c) {
  const auto q = random_rows(c.rows, c.d, 1), kv = random_rows(c.keys, c.d + c.dv, 2);
  const size_t size = size_of(c.type);
  Guarded keys(static_cast<size_t>(c.keys * c.d) * size, size),
      values(static_cast<size_t>(c.keys * c.dv) * size, size);
  std::vector<double> k(static_cast<size_t>(c.keys * c.d)), v(static_cast<size_t>(c.keys * c.dv));
  for (int j = 0; j < c.keys; ++j) {
    for (int i = 0; i < c.d; ++i)
      k[j * c.d + i] = put(c.type, keys.as() + (j * c.d + i) * size, 0.2f * kv[j * (c.d + c.dv) + i]);
    for (int i = 0; i < c.dv; ++i)
      v[j * c.dv + i] = put(c.type, values.as() + (j * c.dv + i) * size, kv[j * (c.d + c.dv) + c.d + i]);
  }
  Guarded scores(static_cast<size_t>(c.rows) * ((c.block + 15) / 16 * 16) * 4),
      out(static_cast<size_t>(c.rows * c.dv) * 4);
  std::memset(out.as(), 0, out.size());
  std::vector<float> top(c.rows, -std::numeric_limits<float>::infinity()), sum(c.rows);
  const auto last = [&](int r) { return c.keys - c.rows + r; };
  const auto first = [&](int r) { return c.window ? std::max(0, last(r) - c.window + 1) : 0; };
  for (int at = 0; at < c.keys; at += c.block) {
    std::vector<int32_t> begin(c.rows), end(c.rows);
    for (int r = 0; r < c.rows; ++r) {
      begin[r] = first(r) - at;
      end[r] = last(r) + 1 - at;
    }
    t.attend({.q = q.data(),
              .q_stride = c.d,
              .rows = c.rows,
              .k = keys.as() + static_cast<size_t>(at * c.d) * size,
              .v = values.as() + static_cast<size_t>(at * c.dv) * size,
              .type = c.type,
              .k_stride = c.d,
              .v_stride = c.dv,
              .keys = std::min(c.block, c.keys - at),
              .begin = begin.data(),
              .end = end.data(),
              .d = c.d,
              .dv = c.dv,
              .scores = scores.as<float>(),
              .top = top.data(),
              .sum = sum.data(),
              .out = out.as<float>()});
  }
  ASSERT_TRUE(out.intact() && scores.intact()) << t.name;
  for (int r = 0; r < c.rows; ++r) {
    std::vector<double> want(c.dv);
    double most = -1e300, all = 0;
    std::vector<double> s(c.keys);
    for (int j = first(r); j <= last(r); ++j) {
      for (int i = 0; i < c.d; ++i) s[j] += static_cast<double>(q[r * c.d + i]) * k[j * c.d + i];
      most = std::max(most, s[j]);
    }
    for (int j = first(r); j <= last(r); ++j) {
      const double p = std::exp(s[j] - most);
      all += p;
      for (int i = 0; i < c.dv; ++i) want[i] += p * v[j * c.dv + i];
    }
    // Scores carry f32 error of d products (|q k| sums to a few hundred at most with the outliers): 1e-4 of
    // the exponent.
    for (int i = 0; i < c.dv; ++i)
      ASSERT_NEAR(out.as<float>()[r * c.dv + i] / sum[r], want[i] / all, 2e-3)
          << t.name << " row " << r << " column " << i << " keys " << c.keys << " block " << c.block;
  }
}

TEST(Attend, EveryTableAgainstDouble) {
  for (const Kernels* t : tables_under_test())
    for (const Real type : {Real::kF32, Real::kBf16, Real::kF16})
      for (const Case& c : {Case{1, 1, 16, 16, 8, type, 0}, Case{1, 37, 64, 64, 16, type, 0},
                            Case{4, 40, 32, 48, 40, type, 0}, Case{5, 33, 96, 64, 7, type, 0},
                            Case{9, 64, 64, 32, 64, type, 5}, Case{3, 50, 48, 16, 13, type, 2}})
        check(*t, c);
}

// A block in which a row sees nothing must leave the row's sums as they are.
TEST(Attend, UnseenBlocksChangeNothing) {
  for (const Kernels* t : tables_under_test()) {
    const auto q = random_rows(2, 16, 1), k = random_rows(8, 16, 2);
    std::vector<float> scores(32), top = {3, 4}, sum = {5, 6}, out(32, 1.5f);
    const int32_t begin[] = {0, 9}, end[] = {-3, 20};
    t->attend({.q = q.data(),
               .q_stride = 16,
               .rows = 2,
               .k = k.data(),
               .v = k.data(),
               .type = Real::kF32,
               .k_stride = 16,
               .v_stride = 16,
               .keys = 8,
               .begin = begin,
               .end = end,
               .d = 16,
               .dv = 16,
               .scores = scores.data(),
               .top = top.data(),
               .sum = sum.data(),
               .out = out.data()});
    EXPECT_EQ(top, (std::vector<float>{3, 4})) << t->name;
    EXPECT_EQ(sum, (std::vector<float>{5, 6})) << t->name;
    EXPECT_EQ(out, std::vector<float>(32, 1.5f)) << t->name;
  }
}

}  // namespace
}  // namespace kt
