#include "base/utf8.h"

#include <gtest/gtest.h>

namespace kt::inline base {
namespace {

TEST(Utf8, StepsAreMaximalSubparts) {
  EXPECT_EQ(replace_invalid_utf8("a\xE2\x82z\xF0\x9F\x98"), "a\uFFFDz\uFFFD");
  EXPECT_EQ(replace_invalid_utf8("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(replace_invalid_utf8("\xC0\xAF\xF4\x90\x80\x80"), "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD");
  EXPECT_TRUE(decode_utf8("\xE2\x82").cut);
  EXPECT_FALSE(decode_utf8("\xE2\x41").cut);
  EXPECT_EQ(decode_utf8("").bytes, 0);
}

TEST(Utf8, EveryCodePointGoesThereAndBack) {
  for (CodePoint code = 0; code <= kLastCodePoint; ++code) {
    const std::string text = to_utf8(code);
    const bool surrogate = code >= 0xD800 && code < 0xE000;
    ASSERT_EQ(decode_utf8(text).valid, !surrogate) << code;
    if (surrogate) continue;
    size_t at = 0;
    ASSERT_EQ(next_code_point(text, at), code);
    ASSERT_EQ(at, text.size());
    ASSERT_EQ(previous_character(text, at), 0u);
  }
}

TEST(Utf8, PrintableIsOneShortLine) {
  EXPECT_EQ(printable("a\nb\x7F\xFF"), "a\\x0ab\\x7f\uFFFD");
  EXPECT_LT(printable(std::string(5000, '\n')).size(), 500u);
}

TEST(Utf8, OneLineIsCutInTheMiddleBetweenCharacters) {
  EXPECT_EQ(one_line("abc", 3), "abc");
  EXPECT_EQ(one_line("0123456789", 9), "012345 ... 789");
  std::string many;
  for (int i = 0; i < 100; ++i) many += "\u6f22";
  for (size_t most = 30; most < 40; ++most) {
    const std::string cut = one_line(many, most);
    EXPECT_EQ(cut.find("\uFFFD"), std::string::npos) << most;
    EXPECT_LE(cut.size(), most + 5);
  }
  EXPECT_EQ(printable("\xc2\x9b\u00a0", 100), "\\x9b\u00a0");
  EXPECT_EQ(printable("abcdef", 3), "abc...");
}

}  // namespace
}  // namespace kt::inline base
