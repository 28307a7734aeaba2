#include "base/checked.h"

#include <gmock/gmock.h>

#include <limits>

namespace kt::inline base {
namespace {

constexpr size_t kMax = std::numeric_limits<size_t>::max();
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();

TEST(Checked, FitsExactly) {
  EXPECT_EQ(checked_mul(kMax, size_t{1}, "n"), kMax);
  EXPECT_EQ(checked_mul(size_t{0}, kMax, "n"), 0u);
  EXPECT_EQ(checked_mul(kLeast, int64_t{1}, "n"), kLeast);
  EXPECT_EQ(checked_add(kMax - 1, size_t{1}, "n"), kMax);
  EXPECT_EQ(checked_add(kMost, kLeast, "n"), -1);
  EXPECT_EQ(checked_mul(size_t{6}, 7, "n"), 42u);
}

TEST(Checked, OverflowNamesTheQuantity) {
  try {
    checked_mul(kMax, size_t{2}, "rows");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInput);
    EXPECT_THAT(e.what(), testing::HasSubstr("rows: 18446744073709551615 * 2"));
  }
  EXPECT_THROW(checked_mul(kLeast, int64_t{-1}, "n"), Error);
  EXPECT_THROW(checked_mul(kMost, int64_t{2}, "n"), Error);
  EXPECT_THROW(checked_add(kMax, size_t{1}, "n"), Error);
  EXPECT_THROW(checked_add(kMost, int64_t{1}, "n"), Error);
  EXPECT_THROW(checked_add(kLeast, int64_t{-1}, "n"), Error);
  EXPECT_THROW(checked_round_up(kMax, size_t{64}, "n"), Error);
}

TEST(Checked, Rounding) {
  EXPECT_EQ(ceil_div(0, 3), 0);
  EXPECT_EQ(ceil_div(1, 3), 1);
  EXPECT_EQ(ceil_div(3, 3), 1);
  EXPECT_EQ(ceil_div(kMax, 2), kMax / 2 + 1);
  EXPECT_EQ(round_up(size_t{0}, 64), 0u);
  EXPECT_EQ(round_up(size_t{1}, 64), 64u);
  EXPECT_EQ(round_up(size_t{64}, 64), 64u);
  static_assert(round_up(13, 5) == 15);
}

}  // namespace
}  // namespace kt::inline base
