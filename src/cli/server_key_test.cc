#include "cli/server_key.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.h"

namespace kt::inline cli {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

class ServerKeyTest : public testing::Test {
 protected:
  ServerKeyTest() { ::unsetenv("KT_API_KEY"); }
  ~ServerKeyTest() override {
    ::unsetenv("KT_API_KEY");
    std::filesystem::remove(path);
  }
  void write(const std::string& bytes) const { std::ofstream(path) << bytes; }
  static std::string complaint(const KeySources& sources) {
    try {
      return "no error, but " + testing::PrintToString(server_keys(sources));
    } catch (const Error& error) {
      return error.what();
    }
  }
  const std::string path =
      (std::filesystem::temp_directory_path() / ("kt_key_" + std::to_string(::getpid()))).string();
};

TEST_F(ServerKeyTest, TheNearestSourceCounts) {
  EXPECT_THAT(server_keys({}), IsEmpty());
  EXPECT_THAT(server_keys({.setting = "set"}), ElementsAre("set"));
  ::setenv("KT_API_KEY", "variable", 1);
  EXPECT_THAT(server_keys({.setting = "set"}), ElementsAre("variable"));
  write("  in a file \r\n");
  EXPECT_THAT(server_keys({.file = path, .setting = "set"}), ElementsAre("in a file"));
  EXPECT_THAT(server_keys({.flag = "flag", .file = path, .setting = "set"}), ElementsAre("flag"));
}

TEST_F(ServerKeyTest, BlankKeysAreNoKeys) {
  for (const char* blank : {"", " ", "\t\n"}) {
    EXPECT_THAT(complaint({.flag = blank}), testing::AllOf(StartsWith("--api-key: "), HasSubstr("blank")));
    ::setenv("KT_API_KEY", blank, 1);
    EXPECT_THAT(complaint({}), testing::AllOf(StartsWith("KT_API_KEY: "), HasSubstr("blank")));
    write(blank);
    EXPECT_THAT(complaint({.file = path}),
                testing::AllOf(StartsWith("--api-key-file: " + path), HasSubstr("blank")));
  }
}

TEST_F(ServerKeyTest, OneALine) {
  write("# of the team\nfirst\r\n\n   second key  \n\t# gone: third\nfourth#4");
  EXPECT_THAT(keys_in_file(path), ElementsAre("first", "second key", "fourth#4"));
  write("# all gone\n");
  EXPECT_THAT(complaint({.file = path}), HasSubstr("blank"));
}

TEST_F(ServerKeyTest, KeysThatNoClientCouldSend) {
  EXPECT_THAT(complaint({.flag = " a"}), HasSubstr("begins or ends"));
  EXPECT_THAT(complaint({.flag = "a\nb"}), HasSubstr("one line"));
  write("one\nt\x01wo\n");
  EXPECT_THAT(complaint({.file = path}), AllOf(HasSubstr(path + ":2: "), HasSubstr("one line")));
  EXPECT_THAT(complaint({.file = "/no/such/file"}), HasSubstr("/no/such/file cannot be read"));
  EXPECT_EQ(server_key_problem("s3cret key"), "");
}

}  // namespace
}  // namespace kt::inline cli
