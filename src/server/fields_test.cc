#include "server/fields.h"

#include <gmock/gmock.h>

#include "server/api_error.h"

namespace kt::inline server {
namespace {

using testing::HasSubstr;

std::string integer_or_why(const std::string& number) {
  const OrderedJson json = OrderedJson::parse("{\"seed\": " + number + "}");
  try {
    return std::to_string(Fields(json).integer("seed", INT64_MIN, INT64_MAX).value());
  } catch (const ApiError& error) {
    return error.what();
  }
}

TEST(FieldsTest, IntegersUpToBothEnds) {
  for (const char* number : {"0", "-1", "9223372036854775807", "-9223372036854775808", "9007199254740993"})
    EXPECT_EQ(integer_or_why(number), number);
  EXPECT_EQ(integer_or_why("3.0"), "3");
  EXPECT_EQ(integer_or_why("-1e18"), "-1000000000000000000");
  for (const char* number : {"9223372036854775808", "18446744073709551615", "-9223372036854775809", "1e19",
                             "-1e300", "0.5", "\"1\"", "true", "[]"})
    EXPECT_THAT(integer_or_why(number),
                HasSubstr("seed: expected an integer in [-9223372036854775808, 9223372036854775807], got "))
        << number;
}

TEST(FieldsTest, ABodyIsFreedOnceItIsRead) {
  HttpRequest request{.body = R"({"a": 1})"};
  EXPECT_EQ(parse_body(request)["a"], 1);
  EXPECT_TRUE(request.body.empty());
}

}  // namespace
}  // namespace kt::inline server
