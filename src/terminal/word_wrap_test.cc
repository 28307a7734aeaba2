#include "terminal/word_wrap.h"

#include <gtest/gtest.h>

#include <random>

#include "terminal/testing/screen.h"

namespace kt::inline terminal {
namespace {

// What a terminal of that width shows when the text comes in these pieces.
std::string shown(int width, const std::vector<std::string>& pieces) {
  Screen screen(width, 60);
  WordWrap wrap(width);
  for (const std::string& piece : pieces) {
    std::string bytes;
    for (char c : wrap.add(piece)) bytes += c == '\n' ? "\r\n" : std::string(1, c);
    screen.write(bytes);
  }
  return screen.text();
}

TEST(WordWrap, BreaksBetweenWords) {
  EXPECT_EQ(shown(20, {"a short line"}), "a short line\n");
  EXPECT_EQ(shown(20, {"the words of a line that is too long for it"}),
            "the words of a line\nthat is too long\nfor it\n");
  EXPECT_EQ(shown(20, {"the words of a li", "ne th", "at", " is", "\ntwo"}),
            "the words of a line\nthat is\ntwo\n");
}

TEST(WordWrap, AWordIsTakenBackHoweverItComes) {
  for (int width = 10; width < 30; ++width) {
    const std::string text = "so many words, one after another: extra, ordinary ones\nand a new line";
    std::vector<std::string> letters;
    for (char c : text) letters.emplace_back(1, c);
    EXPECT_EQ(shown(width, letters), shown(width, {text})) << width;
  }
}

TEST(WordWrap, SpacesAtTheEdgeAreNoLines) {
  EXPECT_EQ(shown(10, {"123456789", " ", "\n", "x"}), "123456789\nx\n");
  EXPECT_EQ(shown(10, {"123456789", "    ", "x"}), "123456789\nx\n");
  EXPECT_EQ(shown(10, {"12345678 ", "x"}), "12345678\nx\n");
}

TEST(WordWrap, WordsLongerThanALine) {
  EXPECT_EQ(shown(10, {"http://", "example.com/", "a b"}), "http://exa\nmple.com/a\nb\n");
  EXPECT_EQ(shown(10, {"see http://example.com/a b"}), "see\nhttp://exa\nmple.com/a\nb\n");
}

TEST(WordWrap, WideCharacters) {
  EXPECT_EQ(shown(10, {"日本語日本語"}), "日本語日\n本語\n");
  EXPECT_EQ(shown(10, {"abcdef 日本"}), "abcdef 日\n本\n");
  EXPECT_EQ(shown(12, {"naive cafe\xCC\x81"}), "naive cafe\xCC\x81\n");
}

TEST(WordWrap, NoWordIsCutThatFitsALine) {
  std::mt19937 rng(5);
  for (int round = 0; round < 200; ++round) {
    const int width = 12 + static_cast<int>(rng() % 40);
    std::string text;
    std::vector<std::string> words;
    for (int i = 0; i < 40; ++i) {
      words.push_back(std::string(rng() % 9 + 1, static_cast<char>('a' + i % 26)));
      text += words.back() + (rng() % 9 == 0 ? "\n" : " ");
    }
    std::vector<std::string> pieces;
    for (size_t at = 0; at < text.size();) {
      const size_t length = rng() % 7 + 1;
      pieces.push_back(text.substr(at, length));
      at += length;
    }
    std::vector<std::string> found;
    std::string word;
    for (char c : shown(width, pieces)) {
      if (c != ' ' && c != '\n') {
        word += c;
        continue;
      }
      if (!word.empty()) found.push_back(word);
      word.clear();
    }
    ASSERT_EQ(found, words) << "width " << width;
  }
}

TEST(WordWrap, WithoutAWidthTextGoesThrough) {
  const std::string text = "as it is, however long it may be";
  EXPECT_EQ(WordWrap(0).add(text), text);
}

}  // namespace
}  // namespace kt::inline terminal
