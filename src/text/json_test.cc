#include "text/json.h"

#include <gmock/gmock.h>

#include "base/testing/error_of.h"
#include "base/testing/temp_folder.h"

namespace kt::inline texts {
namespace {

using testing::HasSubstr;
using namespace testing_files;

std::string message(std::string_view characters, JsonLimits limits = {}) {
  return error_of([&] { parse_json(characters, "f.json", limits); });
}

TEST(ReadJson, ValuesOfAllKinds) {
  const Json v =
      parse_json(R"( {"a":[1,-2,3.5,true,null,"x\u0000y",{"b":{}}],"c":18446744073709551615} )", "f");
  EXPECT_EQ(v, Json::parse(R"({"a":[1,-2,3.5,true,null,"x\u0000y",{"b":{}}],"c":18446744073709551615})"));
  EXPECT_EQ(parse_json("7", "f"), 7);
  EXPECT_EQ(parse_json("[[],[[1]],{}]", "f").dump(), "[[],[[1]],{}]");
}

TEST(ReadJson, RefusesWhatIsNotJson) {
  for (const char* bad : {"",    "{",          "}",     "[1,]",  "{\"a\":}", "{\"a\" 1}", "nul",
                          "NaN", "[Infinity]", "1e999", "{} {}", "{}x",      "// c\n{}",  "\"\xff\"",
                          "'a'", "[1",         "\"a",   "{1:2}", "01",       "\"\t\""}) {
    const std::string got = message(bad);
    EXPECT_THAT(got, HasSubstr("f.json: not JSON at byte ")) << bad;
    EXPECT_EQ(got.find('\n'), std::string::npos) << bad;
  }
  // The lexer alone would take the zero byte for the end.
  EXPECT_THAT(message(std::string_view("{}\0garbage", 10)), HasSubstr("not JSON at byte 2: a zero byte"));
}

TEST(ReadJson, RefusesDuplicateKeysAtAnyDepth) {
  EXPECT_EQ(message(R"({"a":1,"b":2,"a":3})"), "f.json: duplicate key \"a\"");
  EXPECT_EQ(message(R"([{"x":{"y":1,"y":{}}}])"), "f.json: duplicate key \"y\"");
  EXPECT_EQ(message(R"([{"x":1},{"x":1}])"), "no error");
}

TEST(ReadJson, Limits) {
  EXPECT_EQ(message(std::string(64, '[') + std::string(64, ']')), "no error");
  EXPECT_EQ(message(std::string(65, '[') + std::string(65, ']')), "f.json: nested deeper than 64 levels");
  EXPECT_THAT(message(std::string(1000000, '[')), HasSubstr("nested deeper than 64"));
  EXPECT_EQ(message("[1,2,3]", {.bytes = 6}), "f.json: 7 bytes of JSON, at most 6 are read");
  EXPECT_EQ(message("[1,2,3]", {.values = 3}), "f.json: more than 3 values");
  EXPECT_EQ(message("[1,2,3]", {.values = 4}), "no error");
}

TEST(ReadJson, LongTokensDoNotFloodTheMessage) {
  EXPECT_LT(message("\"" + std::string(1 << 20, 'a')).size(), 400u);
  EXPECT_LT(message("{\"" + std::string(1 << 20, 'a') + "\" 1}").size(), 400u);
}

TEST(ReadJson, Files) {
  const TempFolder folder;
  EXPECT_EQ(read_json(folder.put("a.json", "{\"a\":1}"))["a"], 1);
  EXPECT_THAT(error_of([&] { read_json(folder.at("none.json")); }), HasSubstr("none.json: cannot open"));
  EXPECT_THAT(error_of([&] { read_json(folder.put("b.json", "{")); }), HasSubstr("b.json: not JSON"));
  EXPECT_THAT(error_of([&] { read_json(folder.put("empty.json", "")); }), HasSubstr("not JSON"));
}

}  // namespace
}  // namespace kt::inline texts
