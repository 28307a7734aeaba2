#include "bench/limit_windows.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace kt::inline bench {
namespace {

TEST(LimitWindows, MediansOfTheLooksSinceTheLastTime) {
  LimitWindows windows(std::make_shared<Pool>(PoolOptions{.threads = 1}), best_kernels());
  windows.look_now();
  windows.look_now();
  const Rates first = windows.take();
  EXPECT_GT(first.read_bytes, 1e8);
  EXPECT_GT(first.integer_operations, 1e8);
  EXPECT_GT(first.float_operations, 1e8);
  EXPECT_THROW(windows.take(), Error);
}

TEST(LimitWindows, WorkThatFitsACacheIsLeftAlone) {
  LimitWindows windows(std::make_shared<Pool>(PoolOptions{.threads = 1}), best_kernels());
  windows.look_now();
  windows.take();
  windows.look();  // too soon
  EXPECT_THROW(windows.take(), Error);
  for (const double start = now_seconds(); now_seconds() < start + 1.1 * LimitWindows::kLookAfter;) {
  }
  windows.look();
  EXPECT_GT(windows.take().read_bytes, 0);
}

}  // namespace
}  // namespace kt::inline bench
