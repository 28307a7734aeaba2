#include "text/unicode.h"

#include <gtest/gtest.h>

#include <random>

namespace kt::inline texts {
namespace {

TEST(CodeSet, AgreesWithAListOfFlags) {
  std::mt19937 rng(7);
  const auto draw = [&] {
    std::vector<CodeRange> ranges;
    for (int i = 0; i < 20; ++i) {
      const auto first = static_cast<CodePoint>(rng() % 5000);
      ranges.push_back({first, first + static_cast<CodePoint>(rng() % 200)});
    }
    return ranges;
  };
  const auto inside = [](const std::vector<CodeRange>& ranges, CodePoint code) {
    for (const CodeRange& range : ranges)
      if (code >= range.first && code <= range.last) return true;
    return false;
  };
  for (int round = 0; round < 20; ++round) {
    const auto a = draw(), b = draw();
    const CodeSet one(a), two(b);
    const CodeSet either = one.united(two), both = one.intersected(two), neither = either.inverted();
    for (CodePoint code = 0; code < 6000; ++code) {
      ASSERT_EQ(one.contains(code), inside(a, code));
      ASSERT_EQ(either.contains(code), inside(a, code) || inside(b, code));
      ASSERT_EQ(both.contains(code), inside(a, code) && inside(b, code));
      ASSERT_EQ(neither.contains(code), !either.contains(code));
    }
  }
  EXPECT_TRUE(CodeSet().inverted().contains(kLastCodePoint));
  EXPECT_TRUE(CodeSet().inverted().inverted().ranges().empty());
}

TEST(Properties, AFewOfEach) {
  const auto has = [](std::string_view name, CodePoint code) { return property_set(name)->contains(code); };
  EXPECT_TRUE(has("Lu", 'A') && !has("Lu", 'a') && has("L", 0x6F22) && has("Letter", 'z'));
  EXPECT_TRUE(has("N", 0xBD) && !has("Nd", 0xBD) && has("M", 0x301) && has("P", '!') && has("S", '+'));
  EXPECT_TRUE(has("Han", 0x3007) && has("Script=Han", 0x20000) && !has("Han", 0x3042) &&
              has("Hiragana", 0x3042));
  EXPECT_TRUE(has("White_Space", 0x3000) && has("Zs", 0xA0) && has("Any", 0x10FFFF) && has("Cn", 0x10FFFF));
  EXPECT_FALSE(property_set("Lx") || property_set("") || property_set("Nonsense"));
}

TEST(NormalForms, ExamplesOfTheAnnex) {
  EXPECT_EQ(normalised("e\u0301", NormalForm::kNfc), "\u00E9");
  EXPECT_EQ(normalised("\u00E9", NormalForm::kNfd), "e\u0301");
  EXPECT_EQ(normalised("\u212B\u2126", NormalForm::kNfc), "\u00C5\u03A9");
  EXPECT_EQ(normalised("a\u0307\u0323", NormalForm::kNfc), "\u1EA1\u0307");  // marks are put in order
  EXPECT_EQ(normalised("a\u0301\u0301", NormalForm::kNfc), "\u00E1\u0301");  // the second is blocked
  EXPECT_EQ(normalised("\u1100\u1161\u11A8", NormalForm::kNfc), "\uAC01");   // Hangul
  EXPECT_EQ(normalised("\uAC01", NormalForm::kNfd), "\u1100\u1161\u11A8");
  EXPECT_EQ(normalised("\u0958", NormalForm::kNfc), "\u0915\u093C");  // excluded from composition
  EXPECT_EQ(normalised("\uFB01\u00BD", NormalForm::kNfkc), "fi1\u20442");
  EXPECT_EQ(normalised("\u1E9B\u0323", NormalForm::kNfkd), "s\u0323\u0307");
  EXPECT_EQ(normalised("\u1E9B\u0323", NormalForm::kNfkc), "\u1E69");
  EXPECT_EQ(normalised("plain", NormalForm::kNfkc), "plain");
}

// A form of a form is itself, and composing undoes decomposing, for every code point.
TEST(NormalForms, AreStable) {
  for (CodePoint code = 0; code <= kLastCodePoint; ++code) {
    if (code >= 0xD800 && code < 0xE000) continue;
    const std::string text = to_utf8(code);
    const std::string c = normalised(text, NormalForm::kNfc), d = normalised(text, NormalForm::kNfd);
    ASSERT_EQ(normalised(c, NormalForm::kNfc), c) << code;
    ASSERT_EQ(normalised(d, NormalForm::kNfc), c) << code;
    ASSERT_EQ(normalised(c, NormalForm::kNfd), d) << code;
  }
}

}  // namespace
}  // namespace kt::inline texts
