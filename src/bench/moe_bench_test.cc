#include "bench/moe_bench.h"

#include <gtest/gtest.h>

#include <set>

#include "bench/kernel_check.h"
#include "bench/random_matrix.h"
#include "formats/known_formats.h"

namespace kt::inline bench {
namespace {

TEST(DealCalls, OneTokenIsADeckWithoutReplacement) {
  const auto calls = deal_calls({.experts = 13, .hidden = 64, .inter = 64}, 4, 3, 1, Routing::kUniform);
  EXPECT_EQ(calls.size(), 9u);  // three hands of four from each layer, one expert over
  std::set<std::pair<int, int>> seen;
  for (const MoeCall& call : calls) {
    EXPECT_EQ(call.experts_hit, 4);
    for (const int id : call.ids) {
      EXPECT_TRUE(id >= 0 && id < 13);
      EXPECT_TRUE(seen.insert({call.layer, id}).second);
    }
  }
  EXPECT_EQ(seen.size(), 36u);
}

TEST(DealCalls, TokensDoNotRepeatAnExpertAndHitsAreCounted) {
  for (const Routing routing : {Routing::kUniform, Routing::kZipf}) {
    const auto calls = deal_calls({.experts = 16, .hidden = 64, .inter = 64}, 5, 2, 7, routing);
    ASSERT_FALSE(calls.empty());
    for (const MoeCall& call : calls) {
      ASSERT_EQ(call.ids.size(), 35u);
      std::set<int> all(call.ids.begin(), call.ids.end());
      EXPECT_EQ(static_cast<int>(all.size()), call.experts_hit);
      for (size_t t = 0; t < 7; ++t) {
        const auto first = call.ids.begin() + static_cast<ptrdiff_t>(5 * t);
        EXPECT_EQ(std::set<int>(first, first + 5).size(), 5u);
      }
    }
  }
}

TEST(RandomMatrix, IsFiniteAndSmallInEveryFormat) {
  for (const NamedFormat& named : kFormats) {
    const Matrix w = random_matrix(named.format, 7, 512, 5);
    check_finite(w.view(), named.name);
    std::vector<float> values(7 * 512);
    dequantise(w.view(), values);
    double most = 0;
    for (const float v : values) most = std::max<double>(most, std::abs(v));
    EXPECT_GT(most, 0.01) << named.name;
    EXPECT_LT(most, 0.2) << named.name;
  }
}

TEST(KernelCheck, PortableAgreesWithItself) {
  const Kernels& portable = kernels_named("portable");
  for (const NamedFormat& named : kFormats)
    for (const int rows : {1, 3, 37}) {
      const KernelCheck check = check_kernel(portable, portable, named.format, rows);
      EXPECT_TRUE(check.ok()) << named.name << " " << rows << " rows: " << check.difference;
    }
}

TEST(MeasureMoe, FiguresHangTogether) {
  MoeSetup setup;
  setup.pool = std::make_shared<Pool>(PoolOptions{.threads = 2});
  setup.kernels = &best_kernels();
  setup.shape = {.experts = 4, .hidden = 256, .inter = 128};
  setup.top_k = 2;
  setup.layers = 2;
  setup.max_tokens = 3;
  const MoeModel model(setup, format_named("int4"));
  EXPECT_EQ(model.layers(), 2);
  EXPECT_GE(model.packed_bytes_ratio(), 0.9);
  Reader reader(setup.pool, *setup.kernels, 8 << 20);
  for (const int tokens : {1, 3}) {
    const MoeFigures f = measure_moe(model, reader, Routing::kUniform, tokens, {.seconds = 0.05});
    EXPECT_GE(f.windows, 3);
    EXPECT_GT(f.seconds, 0);
    EXPECT_EQ(f.operations, 6.0 * 256 * 128 * 2 * tokens);
    EXPECT_GT(f.limit_seconds, 0);
    EXPECT_LE(f.p90_fraction, f.fraction);
    EXPECT_LE(f.fraction, f.best_fraction);
  }
}

}  // namespace
}  // namespace kt::inline bench
