#include "engine/stop_matcher.h"

#include <gmock/gmock.h>

#include <random>

#include "base/error.h"
#include "base/utf8.h"

namespace kt::inline engine {
namespace {

using testing::HasSubstr;

TEST(StopMatcher, SpansPieces) {
  StopMatcher matcher(std::vector<std::string>{"\n\nUser:", "END"});
  EXPECT_EQ(matcher.push("Hello\n").text, "Hello");
  EXPECT_EQ(matcher.push("\nUs").text, "");
  EXPECT_EQ(matcher.push("age E").text, "\n\nUsage ");
  EXPECT_EQ(matcher.push("N").text, "");
  const StopMatcher::Result result = matcher.push("D of it");
  EXPECT_EQ(result.text, "");
  EXPECT_EQ(result.stop, 1u);
}

TEST(StopMatcher, FirstCompleteThenLongest) {
  StopMatcher first(std::vector<std::string>{"bcd", "c"});
  StopMatcher::Result result = first.push("abcd");
  EXPECT_EQ(result.text, "ab");
  EXPECT_EQ(result.stop, 1u);
  StopMatcher longest(std::vector<std::string>{"b", "ab", "xab"});
  result = longest.push("aab");
  EXPECT_EQ(result.text, "a");
  EXPECT_EQ(result.stop, 1u);
}

TEST(StopMatcher, EndGivesBackWhatWasHeld) {
  StopMatcher matcher(std::vector<std::string>{"stop"});
  EXPECT_EQ(matcher.push("nonsto").text, "non");
  EXPECT_EQ(matcher.flush(), "sto");
  EXPECT_EQ(matcher.push("p").text, "p");  // as new
  StopMatcher none;
  EXPECT_EQ(none.push("text").text, "text");
  EXPECT_EQ(none.flush(), "");
}

TEST(StopMatcher, SaysWhatIsWrong) {
  const auto message_of = [](const std::vector<std::string>& stops) -> std::string {
    try {
      StopMatcher matcher(stops);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(message_of({"a", ""}), "stop: string 1 is empty");
  EXPECT_THAT(message_of({"\xE4\xBD"}), HasSubstr("stop: string 0 is not UTF-8"));
  EXPECT_EQ(message_of({std::string(5000, 'x')}), "stop: string 0 has 5000 bytes, at most 4096 are allowed");
  EXPECT_EQ(message_of(std::vector<std::string>(65, "x")), "stop: at most 64 strings, got 65");
}

// The whole text searched at once: the least end, and the longest string that ends there.
StopMatcher::Result search(const std::string& text, const std::vector<std::string>& stops) {
  StopMatcher::Result best{text};
  size_t best_end = text.size() + 1;
  for (size_t i = 0; i < stops.size(); ++i) {
    const size_t at = text.find(stops[i]);
    if (at == std::string::npos) continue;
    const size_t end = at + stops[i].size();
    const bool better = end < best_end || (end == best_end && stops[i].size() > stops[*best.stop].size());
    if (better) best = {text.substr(0, at), i}, best_end = end;
  }
  return best;
}

TEST(StopMatcher, AnyCutGivesTheSame) {
  std::mt19937 rng(11);
  const std::vector<std::string> letters{"a", "b", "\xC3\xA9", "\xE4\xBD\xA0", "\xE4\xBD\xA1"};
  const auto random_text = [&](size_t most) {
    std::string text;
    for (size_t n = rng() % most + 1; n > 0; --n) text += letters[rng() % letters.size()];
    return text;
  };
  int matches = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> stops(rng() % 4);
    for (std::string& stop : stops) stop = random_text(5);
    const std::string text = random_text(40);
    const StopMatcher::Result expected = search(text, stops);
    StopMatcher matcher(stops);
    std::string shown;
    std::optional<size_t> stop;
    for (size_t at = 0; at < text.size() && !stop;) {
      size_t end = at;
      for (size_t n = rng() % 4 + 1; n > 0 && end < text.size(); --n) next_code_point(text, end);
      const StopMatcher::Result result = matcher.push(std::string_view(text).substr(at, end - at));
      EXPECT_TRUE(is_valid_utf8(result.text));
      shown += result.text;
      stop = result.stop;
      at = end;
    }
    if (!stop) shown += matcher.flush();
    ASSERT_EQ(shown, expected.text);
    // Equal strings are the same stop.
    ASSERT_EQ(stop.has_value(), expected.stop.has_value());
    if (stop) {
      ASSERT_EQ(stops[*stop], stops[*expected.stop]);
    }
    matches += stop.has_value();
  }
  EXPECT_GT(matches, 500);
}

}  // namespace
}  // namespace kt::inline engine
