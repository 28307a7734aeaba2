#include "terminal/terminal_text.h"

#include <gtest/gtest.h>

namespace kt::inline terminal {
namespace {

TEST(Wrapped, BreaksAtSpaces) {
  EXPECT_EQ(wrapped("", "one two three", 8), "one two\nthree\n");
  EXPECT_EQ(wrapped("a  ", "one  two three", 8), "a  one\n   two\n   three\n");
  EXPECT_EQ(wrapped("", "a /very/long/path b", 6), "a\n/very/long/path\nb\n");
  EXPECT_EQ(wrapped("", "", 8), "\n");
  EXPECT_EQ(wrapped("  ", "as  it is, however long", 0), "  as  it is, however long\n");
}

TEST(Wrapped, BreaksBetweenWideCharacters) {
  EXPECT_EQ(wrapped("", "内存不足请减少线程", 8), "内存不足\n请减少线\n程\n");
  EXPECT_EQ(wrapped("- ", "内存不足请减少线程", 9), "- 内存不\n  足请减\n  少线程\n");
  EXPECT_EQ(wrapped("", "用kt运行", 4), "用kt\n运行\n");
  EXPECT_EQ(wrapped("", "运行 kt chat 即可", 10), "运行 kt\nchat 即可\n");
}

TEST(Wrapped, PunctuationStaysWithItsWords) {
  EXPECT_EQ(wrapped("", "内存不足，请减", 8), "内存不\n足，请减\n");
  EXPECT_EQ(wrapped("", "内存不（足）减", 8), "内存不\n（足）减\n");
  EXPECT_EQ(wrapped("", "see kt，or", 6), "see\nkt，or\n");
  for (int width = 4; width < 40; ++width) {
    const std::string lines = wrapped("", "可用 {}，共（几个）：参见 kt run --help；好。", width);
    for (size_t at = lines.find('\n'); at + 1 < lines.size(); at = lines.find('\n', at + 1))
      for (const char* mark : {"，", "；", "：", "）", "。"})
        EXPECT_FALSE(lines.substr(at + 1).starts_with(mark)) << width << "\n" << lines;
  }
}

TEST(PaddedTo, CountsColumns) {
  EXPECT_EQ(padded_to("内存", 6), "内存  ");
  EXPECT_EQ(padded_to("memory", 4), "memory");
}

}  // namespace
}  // namespace kt::inline terminal
