#include "base/text.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace kt::inline base {
namespace {

TEST(Text, FillsHolesInOrder) {
  EXPECT_EQ(text("{} of {}", 3, "four"), "3 of four");
  EXPECT_EQ(text("{}{}", std::string("a"), std::string_view("b")), "ab");
  EXPECT_EQ(text(""), "");
  EXPECT_EQ(text("plain"), "plain");
}

TEST(Text, IntegersOfEveryWidth) {
  EXPECT_EQ(text("{}", std::numeric_limits<int64_t>::min()), "-9223372036854775808");
  EXPECT_EQ(text("{}", std::numeric_limits<uint64_t>::max()), "18446744073709551615");
  EXPECT_EQ(text("{} {}", int8_t{-1}, uint8_t{255}), "-1 255");
  EXPECT_EQ(text("{} {}", true, 'x'), "true x");
}

TEST(Text, Doubles) {
  EXPECT_EQ(text("{}", 0.1), "0.1");
  EXPECT_EQ(text("{}", 0.1f), "0.1");
  EXPECT_EQ(text("{}", 1.0 / 3), "0.333333");
  EXPECT_EQ(text("{}", 16777217.0), "16777217");
  EXPECT_EQ(text("{}", -2.0), "-2");
  EXPECT_EQ(text("{}", -0.0), "-0");
  EXPECT_EQ(text("{}", 1e300), "1e+300");
  EXPECT_EQ(text("{}", std::numeric_limits<double>::infinity()), "inf");
  EXPECT_EQ(text("{}", std::numeric_limits<double>::quiet_NaN()), "nan");
}

TEST(Text, WrongNumberOfArgumentsLosesNothing) {
  EXPECT_EQ(text_of("{} {}", 1), "1 {}");
  EXPECT_EQ(text_of("{}"), "{}");
  EXPECT_EQ(text_of("done", 1, "two"), "done [1, two]");
}

// What does not compile is in testing/holes.cc.
TEST(Text, HolesAreCounted) {
  static_assert(holes_of("") == 0 && holes_of("{}") == 1 && holes_of("{}{}") == 2);
  static_assert(holes_of("{{}}") == 0 && holes_of("{{{}}}") == 1 && holes_of("{a} {") == 0);
}

TEST(Text, PatternsAreExchangedWhenTheyAreUsed) {
  constexpr ExchangedPattern kPattern{"{} of {}", [](std::string_view) { return std::string("{} von {}"); }};
  EXPECT_EQ(text(kPattern, 1, 2), "1 von 2");
}

TEST(Text, Braces) {
  EXPECT_EQ(text("{{}} {}", 1), "{} 1");
  EXPECT_EQ(text("{"), "{");
  EXPECT_EQ(text("}"), "}");
  EXPECT_EQ(text_of("{a} {", 1), "{a} { [1]");
  EXPECT_EQ(text("{}", "{}"), "{}");
}

TEST(Text, NullPointerIsNamed) {
  const char* none = nullptr;
  EXPECT_EQ(text("{}", none), "(null)");
}

TEST(Text, HumanBytes) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1024), "1.0 KiB");
  EXPECT_EQ(human_bytes(1536), "1.5 KiB");
  EXPECT_EQ(human_bytes((1 << 20) - 1), "1.0 MiB");
  EXPECT_EQ(human_bytes(std::numeric_limits<uint64_t>::max()), "16.0 EiB");
}

}  // namespace
}  // namespace kt::inline base
