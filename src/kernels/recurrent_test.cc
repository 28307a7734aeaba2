// Kernels of recurrent layers, of every table: against plain loops, and to the bit against the first one and against
// themselves with tokens cut anywhere.
#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <random>
#include <vector>

#include "base/memory.h"
#include "kernels/row_ops.h"
#include "kernels/testing/guarded_row.h"
#include "kernels/testing/tables.h"

namespace kt::inline kernels {
namespace {

double silu(double x) { return x / (1 + std::exp(-x)); }

TEST(Recurrent, DotsOfEveryLength) {
  for (const int n : {1, 3, 16, 24, 64, 100, 128, 577}) {
    const std::vector<float> x = random_row(n, 1), y = random_row(n, 2);
    double want = 0;
    for (size_t i = 0; i < x.size(); ++i) want += double{x[i]} * y[i];
    const float first = tables_under_test().front()->rows->dot(x.data(), y.data(), n);
    for (const Kernels* table : tables_under_test()) {
      const Row a(x), b(y);
      const float got = table->rows->dot(a.data(), b.data(), n);
      EXPECT_NEAR(got, want, 1e-6 * n) << table->name;
      EXPECT_EQ(got, first) << table->name << " " << n;
    }
  }
}

TEST(Recurrent, GatesOfBothKinds) {
  for (const int n : {1, 15, 16, 40, 129}) {
    const std::vector<float> x = random_row(n, 3), gates = random_row(n, 4, 20);
    for (const GateKind kind : {GateKind::kSigmoid, GateKind::kSilu}) {
      std::vector<float> first;
      for (const Kernels* table : tables_under_test()) {
        const Row row(x), gate(gates);
        table->rows->gate(row.data(), gate.data(), n, kind);
        EXPECT_TRUE(row.memory.intact() && gate.memory.intact());
        for (size_t i = 0; i < x.size(); ++i) {
          const double g = gates[i], by = kind == GateKind::kSilu ? silu(g) : 1 / (1 + std::exp(-g));
          EXPECT_NEAR(row.data()[i], x[i] * by, 1e-6 * std::abs(x[i] * by) + 1e-30) << table->name;
        }
        if (first.empty()) first = row.values();
        EXPECT_EQ(row.values(), first) << table->name;
      }
    }
  }
}

TEST(Recurrent, Convolutions) {
  for (const int taps : {1, 2, 4, 5})
    for (const int n : {1, 16, 24, 40, 100}) {
      const int stride = n + 3;
      std::vector<std::vector<float>> rows;
      for (int j = 0; j < taps; ++j) rows.push_back(random_row(n, static_cast<unsigned>(10 + j)));
      const std::vector<float> weights = random_row((taps - 1) * stride + n, 5);
      std::vector<float> first;
      for (const Kernels* table : tables_under_test()) {
        const Row to{std::vector<float>(static_cast<size_t>(n))}, w(weights);
        std::deque<Row> held;
        std::vector<const float*> at;
        for (const auto& row : rows) at.push_back(held.emplace_back(row).data());
        table->rows->convolve(
            {.rows = at.data(), .taps = taps, .weights = w.data(), .stride = stride, .n = n, .y = to.data()});
        EXPECT_TRUE(to.memory.intact());
        for (int c = 0; c < n; ++c) {
          double sum = 0;
          for (int j = 0; j < taps; ++j)
            sum += double{rows[static_cast<size_t>(j)][static_cast<size_t>(c)]} *
                   weights[static_cast<size_t>(j * stride + c)];
          EXPECT_NEAR(to.data()[c], silu(sum), 2e-6 * (1 + std::abs(sum))) << table->name;
        }
        if (first.empty()) first = to.values();
        EXPECT_EQ(to.values(), first) << table->name;
      }
    }
}

// Tokens of one head, and a state to begin with.
struct DeltaCase {
  int rows, width, tokens;
  int columns = (width + 15) / 16 * 16;
  int stride = rows + width + 1;  // between tokens, of q, k and v alike
  std::vector<float> q, k, v, state;
  std::vector<DeltaFactors> factors;

  DeltaCase(int key, int value, int count) : rows(key), width(value), tokens(count) {
    const auto numbers = [&](int n, unsigned seed) {
      return random_row(int64_t{tokens - 1} * stride + n, seed, 1 / std::sqrt(static_cast<float>(rows)));
    };
    q = numbers(rows, 20);
    k = numbers(rows, 21);
    v = numbers(width, 22);
    state = random_row(int64_t{rows} * columns, 23);
    for (size_t i = 0; i < state.size(); ++i)
      if (static_cast<int>(i) % columns >= width) state[i] = 0;
    std::mt19937 random(24);
    std::uniform_real_distribution<float> part(0.05f, 1);
    for (int t = 0; t < tokens; ++t) {
      double dot = 0;
      for (int i = 0; i < rows; ++i)
        dot += double{q[static_cast<size_t>(t * stride + i)]} * k[static_cast<size_t>(t * stride + i)];
      factors.push_back({.decay = part(random), .beta = part(random), .dot = static_cast<float>(dot)});
    }
  }

  // As the rule says it, in double.
  std::pair<std::vector<double>, std::vector<double>> plain() const {
    std::vector<double> s(state.begin(), state.end()), out;
    const auto number = [&](const std::vector<float>& x, int t, int i) -> double {
      return x[static_cast<size_t>(t * stride + i)];
    };
    for (int t = 0; t < tokens; ++t)
      for (int c = 0; c < width; ++c) {
        const DeltaFactors& f = factors[static_cast<size_t>(t)];
        const auto at = [&](int i) -> double& { return s[static_cast<size_t>(i * columns + c)]; };
        double seen = 0, answer = 0;
        for (int i = 0; i < rows; ++i) seen += (at(i) *= f.decay) * number(k, t, i);
        const double d = f.beta * (number(v, t, c) - seen);
        for (int i = 0; i < rows; ++i) answer += (at(i) += number(k, t, i) * d) * number(q, t, i);
        out.push_back(answer);
      }
    return {out, s};
  }

  // Outputs and then the state, tokens cut after `cut` of them.
  std::vector<float> run(const Kernels& table, int cut) const {
    Buffer memory(state.size() * sizeof(float));
    auto* s = reinterpret_cast<float*>(memory.data());
    std::copy(state.begin(), state.end(), s);
    const Row queries(q), keys(k), values(v), out{std::vector<float>(static_cast<size_t>(tokens * width))};
    for (const auto& [from, count] : {std::pair{0, cut}, {cut, tokens - cut}})
      table.rows->delta_rule({.state = s,
                              .rows = rows,
                              .columns = columns,
                              .width = width,
                              .tokens = count,
                              .q = queries.data() + from * stride,
                              .k = keys.data() + from * stride,
                              .v = values.data() + from * stride,
                              .stride = stride,
                              .factors = factors.data() + from,
                              .factor_stride = 1,
                              .out = out.data() + from * width,
                              .out_stride = width});
    EXPECT_TRUE(out.memory.intact() && values.memory.intact());
    std::vector<float> both = out.values();
    both.insert(both.end(), s, s + state.size());
    return both;
  }
};

TEST(Recurrent, TheDeltaRule) {
  for (const int rows : {1, 24, 128})
    for (const int width : {1, 8, 16, 17, 32})
      for (const int tokens : {1, 2, 9}) {
        const DeltaCase one(rows, width, tokens);
        const auto [out, state] = one.plain();
        std::vector<double> want = out;
        want.insert(want.end(), state.begin(), state.end());
        const std::vector<float> first = one.run(*tables_under_test().front(), 0);
        ASSERT_EQ(first.size(), want.size());
        for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(first[i], want[i], 2e-5) << rows << " " << width;
        for (const Kernels* table : tables_under_test())
          for (const int cut : {0, 1, tokens / 2, tokens})
            EXPECT_EQ(one.run(*table, cut), first)
                << table->name << " " << rows << " " << width << " " << cut;
      }
}

}  // namespace
}  // namespace kt::inline kernels
