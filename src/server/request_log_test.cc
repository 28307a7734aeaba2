#include "server/request_log.h"

#include <gmock/gmock.h>

namespace kt::inline server {
namespace {

TEST(RequestLog, OneLineOfWords) {
  HttpRecord record{.client = "127.0.0.1:5",
                    .method = "POST",
                    .path = "/v1/chat/completions",
                    .status = 200,
                    .whole = true,
                    .seconds = 0.8124,
                    .note = "12+34"};
  EXPECT_EQ(request_line(record, 1'700'000'000),
            "2023-11-14T22:13:20Z 127.0.0.1:5 POST /v1/chat/completions 200 tokens=12+34 ms=812.4");
  record.whole = false;
  record.note = "";
  EXPECT_THAT(request_line(record, 0), testing::HasSubstr(" 499 tokens=- ms="));
}

TEST(RequestLog, APathCannotForgeALine) {
  const HttpRecord record{
      .client = "-", .path = "/a b\n2023 200 \x1b[2J" + std::string(5000, 'x'), .status = 404, .whole = true};
  const std::string line = request_line(record, 0);
  EXPECT_EQ(line.find_first_of("\n\x1b"), line.npos);
  EXPECT_EQ(std::ranges::count(line, ' '), 6);
  EXPECT_LT(line.size(), 400u);
  EXPECT_THAT(line, testing::HasSubstr(" - /a%20b"));
}

}  // namespace
}  // namespace kt::inline server
