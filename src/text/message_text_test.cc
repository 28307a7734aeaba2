#include "text/message_text.h"

#include <gmock/gmock.h>

#include "base/error.h"

namespace kt::inline texts {
namespace {

std::string text_or_error(const char* content) {
  try {
    return message_text(OrderedJson::parse(content), "content");
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(MessageText, JoinsParts) {
  EXPECT_EQ(text_or_error(R"("as it is")"), "as it is");
  EXPECT_EQ(text_or_error("[]"), "");
  EXPECT_EQ(text_or_error(R"([{"type": "text", "text": "a"}, {"type": "input_text", "text": ""},
                              {"type": "output_text", "text": "b"}, {"type": "refusal", "refusal": "no"}])"),
            "a\n\nb\nno");
}

TEST(MessageText, ErrorsNameThePart) {
  EXPECT_EQ(text_or_error("3"), "content: expected a string or an array of text parts, got a number");
  EXPECT_EQ(text_or_error(R"(["a"])"), "content[0]: expected an object, got a string");
  EXPECT_EQ(text_or_error(R"([{"type": "text", "text": "a"}, {"type": "text"}])"),
            "content[1].text: expected a string, got null");
  EXPECT_EQ(text_or_error(R"([{"type": "image_url", "image_url": {}}])"),
            "content[0].type: parts of type \"image_url\" are not supported; expected \"text\"");
}

}  // namespace
}  // namespace kt::inline texts
