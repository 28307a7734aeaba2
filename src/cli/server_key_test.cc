#include "cli/server_key.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.h"

namespace kt {
namespace {

using testing::HasSubstr;
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
      return "no error, but " + server_key(sources);
    } catch (const Error& error) {
      return error.what();
    }
  }
  const std::string path =
      (std::filesystem::temp_directory_path() / ("kt_key_" + std::to_string(::getpid()))).string();
};

TEST_F(ServerKeyTest, TheNearestSourceCounts) {
  EXPECT_EQ(server_key({}), "");
  EXPECT_EQ(server_key({.setting = "set"}), "set");
  ::setenv("KT_API_KEY", "variable", 1);
  EXPECT_EQ(server_key({.setting = "set"}), "variable");
  write("  in a file \r\n");
  EXPECT_EQ(server_key({.file = path, .setting = "set"}), "in a file");
  EXPECT_EQ(server_key({.flag = "flag", .file = path, .setting = "set"}), "flag");
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

TEST_F(ServerKeyTest, KeysThatNoClientCouldSend) {
  EXPECT_THAT(complaint({.flag = " a"}), HasSubstr("begins or ends"));
  EXPECT_THAT(complaint({.flag = "a\nb"}), HasSubstr("one line"));
  write("one\ntwo\n");
  EXPECT_THAT(complaint({.file = path}), HasSubstr("one line"));
  EXPECT_THAT(complaint({.file = "/no/such/file"}), HasSubstr("/no/such/file cannot be read"));
  EXPECT_EQ(server_key_problem("s3cret key"), "");
}

}  // namespace
}  // namespace kt
