#include "bench/stream_event.h"

#include <gtest/gtest.h>

namespace kt::inline bench {
namespace {

TEST(StreamEvent, TellsTextFromTheRest) {
  EXPECT_TRUE(read_stream_event(R"({"choices":[{"text":"a","index":0}]})").has_text);
  EXPECT_TRUE(read_stream_event(R"({"choices": [{"delta": {"content": "a"}}]})").has_text);
  EXPECT_TRUE(
      read_stream_event(R"({"choices":[{"delta":{"content":null,"reasoning_content":"hm"}}]})").has_text);
  const StreamEvent role = read_stream_event(R"({"choices":[{"delta":{"role":"assistant","content":""}}]})");
  EXPECT_FALSE(role.has_text);
  EXPECT_TRUE(role.has_choice);
  EXPECT_FALSE(
      read_stream_event(R"({"choices":[{"text":"","finish_reason":"length"}],"usage":null})").has_text);
  EXPECT_TRUE(read_stream_event("[DONE]").done);
  EXPECT_FALSE(read_stream_event(R"({"choices":[{"text":"[DONE]"}]})").done);
}

TEST(StreamEvent, WordsInsideTextAreNotKeys) {
  const StreamEvent event =
      read_stream_event(R"({"choices":[{"text":"\"usage\":{\"error\":{","logprobs":null}]})");
  EXPECT_TRUE(event.has_text);
  EXPECT_FALSE(event.usage);
  EXPECT_EQ(event.error, "");
  EXPECT_FALSE(read_stream_event(R"({"choices":[{"text":""}],"object":"content"})").has_text);
}

TEST(StreamEvent, UsageIsRead) {
  const StreamEvent event = read_stream_event(
      R"({"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":30,"total_tokens":37}})");
  ASSERT_TRUE(event.usage);
  EXPECT_EQ(event.usage->prompt, 7);
  EXPECT_EQ(event.usage->completion, 30);
  EXPECT_FALSE(event.has_choice);
}

TEST(StreamEvent, ErrorsGiveTheirMessage) {
  EXPECT_EQ(read_stream_event(R"({"error":{"message":"no room","code":503}})").error, "no room");
  EXPECT_EQ(read_stream_event(R"({"error": "no room"})").error, "no room");
  EXPECT_EQ(read_stream_event(R"({"choices":[{"text":"a"}],"error":null})").error, "");
}

TEST(StreamEvent, AnythingElseIsNothing) {
  for (const char* data : {"", "{", "null", "\"choices\"", "{\"choices\":", "{\"usage\":{", "[1]"}) {
    const StreamEvent event = read_stream_event(data);
    EXPECT_FALSE(event.done || event.has_text || event.usage) << data;
  }
}

TEST(ErrorMessage, KnowsTheUsualShapes) {
  EXPECT_EQ(error_message(R"({"error":{"message":"a\nb"}})"), "a b");
  EXPECT_EQ(error_message(R"({"detail":"gone"})"), "gone");
  EXPECT_EQ(error_message(R"({"message":"gone"})"), "gone");
  EXPECT_EQ(error_message("<html>"), "<html>");
  EXPECT_EQ(error_message(""), "");
  EXPECT_LT(error_message(std::string(5000, 'x')).size(), 200u);
}

}  // namespace
}  // namespace kt::inline bench
