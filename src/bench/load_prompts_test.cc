#include "bench/load_prompts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace kt::inline bench {
namespace {

int64_t words_in(const std::string& prompt) { return std::ranges::count(prompt, ' ') + 1; }

TEST(LoadPrompts, HaveTheWordsAskedFor) {
  LoadPrompts prompts(1);
  for (int words : {1, 2, 3, 100}) EXPECT_EQ(words_in(prompts.next(words)), words);
}

TEST(LoadPrompts, NeighboursBeginWithOtherWords) {
  LoadPrompts prompts(1);
  std::set<std::string> firsts, whole;
  for (int i = 0; i < 100; ++i) {
    const std::string prompt = prompts.next(8);
    firsts.insert(prompt.substr(0, prompt.find(' ')));
    whole.insert(prompt);
  }
  EXPECT_EQ(firsts.size(), 100u);
  for (int i = 0; i < 1000; ++i) whole.insert(prompts.next(8));
  EXPECT_EQ(whole.size(), 1100u);
}

TEST(LoadPrompts, TheSeedDecides) {
  LoadPrompts a(1), b(1), c(2);
  const std::string from_a = a.next(20);
  EXPECT_EQ(from_a, b.next(20));
  EXPECT_NE(from_a, c.next(20));
  EXPECT_EQ(a.shared(9), LoadPrompts(1).shared(9));
  const std::string shared = a.shared(9);
  EXPECT_TRUE(a.next(5, shared).starts_with(shared + " "));
}

TEST(LoadPrompts, WordsAreFoundForTokens) {
  // Three tokens for two words and one at the beginning.
  const CountTokens count = [](const std::string& prompt) { return 1 + words_in(prompt) * 3 / 2; };
  for (int64_t tokens : {2, 10, 128, 2048}) {
    const int words = LoadPrompts::words_for(tokens, count);
    EXPECT_NEAR(static_cast<double>(1 + words * 3 / 2), static_cast<double>(tokens), 2) << tokens;
  }
  EXPECT_GE(LoadPrompts::words_for(50, [](const std::string&) { return 0; }), 1);
}

}  // namespace
}  // namespace kt::inline bench
