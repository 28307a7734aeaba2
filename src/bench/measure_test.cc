#include "bench/measure.h"

#include <gtest/gtest.h>

#include <memory>

#include "base/error.h"

namespace kt::inline bench {
namespace {

TEST(Quantile, InterpolatesBetweenNeighbours) {
  EXPECT_EQ(quantile({}, 0.5), 0);
  EXPECT_EQ(quantile({7}, 0.9), 7);
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 2, 3}), 2.5);
  EXPECT_EQ(quantile({5, 1, 3}, 0), 1);
  EXPECT_EQ(quantile({5, 1, 3}, 1), 5);
}

TEST(Reader, WindowsWrapAroundTheBuffer) {
  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = 2});
  Reader reader(pool, best_kernels(), 3 << 20);
  EXPECT_GE(reader.size(), size_t{3} << 20);
  for (const size_t bytes : {size_t{1}, size_t{5} << 20, reader.size(), 3 * reader.size() + 64})
    EXPECT_GT(reader.window(bytes), 0);
}

TEST(Multiplier, EveryProductOfEveryRunningIsa) {
  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = 2});
  for (const Product product : {Product::kS8, Product::kBf16, Product::kF32}) {
    if (!has_product(best_kernels(), product)) {
      EXPECT_THROW(Multiplier(pool, best_kernels(), product), Error);
      continue;
    }
    Multiplier multiplier(pool, best_kernels(), product);
    EXPECT_GT(multiplier.window(1e-3), 0);
  }
}

TEST(HostLoss, IsNeverNegative) {
  HostLoss loss(std::make_shared<Pool>(PoolOptions{.threads = 2}));
  EXPECT_GE(loss.since_last(), 0);
  EXPECT_LT(loss.since_last(), 10);
}

}  // namespace
}  // namespace kt::inline bench
