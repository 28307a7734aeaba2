#include "text/regex.h"

#include <gmock/gmock.h>

#include "base/error.h"

namespace kt::inline texts {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<std::string> matches(std::string_view pattern, std::string_view text,
                                 RegexDialect dialect = RegexDialect::kOniguruma) {
  const Regex regex(pattern, dialect);
  RegexSearch search(regex, text);
  std::vector<std::string> found;
  while (const auto match = search.next())
    found.emplace_back(text.substr(match->begin, match->end - match->begin));
  return found;
}

std::string problem(std::string_view pattern, RegexDialect dialect = RegexDialect::kOniguruma) {
  try {
    Regex regex(pattern, dialect);
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

TEST(Regex, AlternativesInOrder) {
  EXPECT_THAT(matches("a|ab|c", "abc"), ElementsAre("a", "c"));
  EXPECT_THAT(matches("ab|a|c", "abc"), ElementsAre("ab", "c"));
  EXPECT_THAT(matches("x|", "axb"), ElementsAre("", "x", ""));
}

TEST(Regex, Quantifiers) {
  EXPECT_THAT(matches("a{2,3}", "aaaaaaa"), ElementsAre("aaa", "aaa"));
  EXPECT_THAT(matches("a{2}", "aaaaa"), ElementsAre("aa", "aa"));
  EXPECT_THAT(matches("a+?b?", "aab"), ElementsAre("a", "ab"));
  EXPECT_THAT(matches("a*+a", "aaa"), IsEmpty());
  EXPECT_THAT(matches("(?>a+)b", "aaab"), ElementsAre("aaab"));
  EXPECT_THAT(matches("(?:ab){2,}", "abababx"), ElementsAre("ababab"));
  EXPECT_THAT(matches("(?:ab)*?c", "ababc"), ElementsAre("ababc"));
  EXPECT_THAT(matches("x{,2}y", "xxxy"), ElementsAre("xxy"));
  EXPECT_THAT(matches("a{x}", "a{x}"), ElementsAre("a{x}"));
}

// {1,3}+ is the one place where patterns in use mean different things to the two engines.
TEST(Regex, BracesAndPlus) {
  EXPECT_THAT(matches("\\d{1,3}+", "12345", RegexDialect::kOniguruma), ElementsAre("12345"));
  EXPECT_THAT(matches("\\d{1,3}+", "12345", RegexDialect::kRust), ElementsAre("123", "45"));
}

TEST(Regex, LookAround) {
  EXPECT_THAT(matches("\\s+(?!\\S)|\\s+", "a   b"), ElementsAre("  ", " "));
  EXPECT_THAT(matches("a(?=b)", "abac"), ElementsAre("a"));
  EXPECT_THAT(matches("(?<=a)b|(?<!a)c", "abcac"), ElementsAre("b", "c"));
}

TEST(Regex, Classes) {
  EXPECT_THAT(matches("[a-c&&[^b]]+", "abcca"), ElementsAre("a", "cca"));
  EXPECT_THAT(matches("[^\\r\\n\\p{L}]+", "ab1 2\nc"), ElementsAre("1 2"));
  EXPECT_THAT(matches("[]x]+", "x]y"), ElementsAre("x]"));
  EXPECT_THAT(matches("[\\]\\-a]+", "-a]b"), ElementsAre("-a]"));
  EXPECT_THAT(matches("[\\p{Han}]+", "ab漢字か"), ElementsAre("漢字"));
  EXPECT_THAT(matches("\\P{L}|\\p{^Lu}", "aB1"), ElementsAre("a", "1"));
  EXPECT_THAT(matches("\\x{1F600}|\\u00e9|\\x41", "é😀A"), ElementsAre("é", "😀", "A"));
}

TEST(Regex, CaseFolding) {
  EXPECT_THAT(matches("(?i:'s|'re)", "'S 'ſ 'Re 'x"), ElementsAre("'S", "'ſ", "'Re"));
  EXPECT_THAT(matches("(?i:[k-m])x", "Kx\u212AxKX"), ElementsAre("Kx", "\u212Ax"));
  EXPECT_THAT(matches("(?i)a|b", "AB"), ElementsAre("A", "B"));
  EXPECT_THAT(matches("(?:(?i)a)a", "Aaaa"), ElementsAre("Aa", "aa"));
}

TEST(Regex, Places) {
  EXPECT_THAT(matches("^a|b$", "ab\nab"), ElementsAre("a", "b", "a", "b"));
  EXPECT_THAT(matches("^a|b$", "ab\nab", RegexDialect::kRust), ElementsAre("a", "b"));
  EXPECT_THAT(matches("\\Aa|b\\z|a\\Z", "aa\nb"), ElementsAre("a", "b"));
  EXPECT_THAT(matches("\\b\\w", "ab cd"), ElementsAre("a", "c"));
}

TEST(Regex, PythonsWays) {
  const auto python = RegexDialect::kPython;
  EXPECT_THAT(matches("^a|b$", "ab\nab\n", python), ElementsAre("a", "b"));
  EXPECT_THAT(matches("b\\Z", "b\n", python), IsEmpty());
  EXPECT_THAT(matches("[[&&x]+", "a[&x", python), ElementsAre("[&x"));
  EXPECT_THAT(matches("[[:a]]", ":]a]b", python), ElementsAre(":]", "a]"));
  EXPECT_THAT(matches("(?P<layer>\\d+)\\.w", "12.w", python), ElementsAre("12.w"));
  EXPECT_THAT(matches("\\d{1,3}+", "12345", python), ElementsAre("123", "45"));
  EXPECT_THAT(matches("\\w+", "a_1\u0301 \u00e9", python), ElementsAre("a_1", "\u00e9"));
  EXPECT_THAT(matches("x{,}y", "axxy", python), ElementsAre("xxy"));
  EXPECT_THAT(matches("^b|^a", "ab", python), ElementsAre("a"));
  for (const char* refused :
       {"a**", "a{2}{3}", "a+?*", "{2}", "a|{1,}", "b(?i)a", "\\p{L}", "\\e", "\\z", "\\x4", "\\x{41}",
        "[\\d-z]", "(?P<1>a)", "(?P<n>a)(?P<n>b)", "(?P<>a)", "(?P<n"})
    EXPECT_THAT(problem(refused, python), HasSubstr("pattern")) << refused;
}

// A pattern that begins with ^ is not tried at every place of a text.
TEST(Regex, OnlyTheStartIsTriedWhereNothingElseCanMatch) {
  const Regex regex("^b", RegexDialect::kRust);
  RegexSearch search(regex, std::string_view("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"));
  EXPECT_FALSE(search.next());
  EXPECT_LT(search.steps(), 5);
}

TEST(Regex, AtTheStartOnly) {
  const Regex regex("b|ab?");
  const auto end_of = [&](std::string_view text) {
    const auto match = RegexSearch(regex, text).at_start();
    return match ? static_cast<int>(match->end) : -1;
  };
  EXPECT_EQ(end_of("abb"), 2);
  EXPECT_EQ(end_of("ba"), 1);
  EXPECT_EQ(end_of("cab"), -1);
  EXPECT_EQ(end_of(""), -1);
}

TEST(Regex, SyntaxOutsideTheListIsNamedWithItsPlace) {
  EXPECT_THAT(problem("(a)\\1"), HasSubstr("\\1 at byte 3"));
  EXPECT_THAT(problem("a\\p{Klingon}"), HasSubstr("\"Klingon\""));
  for (const char* pattern : {"(",           ")",       "a)",
                              "[a",          "[z-a]",   "*a",
                              "(?<n>a)",     "(?m:a)",  "\\",
                              "\\x{110000}", "a{3,2}",  "(?:a?)*",
                              "(?<=ab)c",    "(?=a)*",  "[[:alpha:]]",
                              "\\p{L",       "\\h",     "\\K",
                              "[a-\\d]",     "a{1001}", "(?:(?:(?:a{999}b){99}){99}){99}",
                              "\xFF"})
    EXPECT_THAT(problem(pattern), HasSubstr("pattern")) << pattern;
  EXPECT_THAT(problem(std::string(20000, 'a')), HasSubstr("20000"));
  EXPECT_THAT(problem(std::string(1000, '(')), HasSubstr("nested"));
  EXPECT_THAT(problem("a\nb("), HasSubstr("a\\x0ab("));
}

TEST(Regex, StepsAreBounded) {
  const Regex evil("(?:a|aa)+b|(?:a+)+c");
  const std::string text(2000, 'a');
  RegexSearch search(evil, text);
  EXPECT_THROW(search.next(), Error);
  EXPECT_THROW(RegexSearch(evil, text, 100).at_start(), Error);
}

// The patterns in use take a few steps for each byte whatever the text is.
TEST(Regex, LongRunsAreLinear) {
  const Regex regex(
      R"((?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)");
  for (const std::string unit : {" ", "a", "\n", "!", " \n", "a ", "é", "漢", "'"}) {
    std::string text;
    for (int i = 0; i < 200'000; ++i) text += unit;
    RegexSearch search(regex, text);
    size_t end = 0;
    while (const auto match = search.next()) {
      EXPECT_EQ(match->begin, end);
      end = match->end;
    }
    EXPECT_EQ(end, text.size());
  }
}

}  // namespace
}  // namespace kt::inline texts
