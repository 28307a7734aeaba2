#include "cli/settings.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <thread>

#include "cli/home.h"
#include "text/yaml.h"
#include "weights/testing/files.h"

namespace kt::inline cli {
namespace {

// A kt folder of its own for the life of a test.
class SettingsTest : public ::testing::Test {
 protected:
  SettingsTest() { ::setenv("KT_HOME", folder_.at("home").c_str(), 1); }
  ~SettingsTest() override { ::unsetenv("KT_HOME"); }
  void put(std::string_view characters) { folder_.put("home/config.yaml", characters); }
  std::string load_error() {
    return error_of([] { load_settings(); });
  }

  testing_files::TempFolder folder_;
};

TEST(Home, FollowsTheVariables) {
  const std::string home = std::getenv("HOME") ? std::getenv("HOME") : "/";
  ::setenv("KT_HOME", "/a", 1);
  EXPECT_EQ(kt_home(), "/a");
  ::unsetenv("KT_HOME");
  ::setenv("XDG_CONFIG_HOME", "/b", 1);
  EXPECT_EQ(kt_home(), "/b/kt");
  ::unsetenv("XDG_CONFIG_HOME");
  ::setenv("HOME", "/c", 1);
  EXPECT_EQ(kt_home(), "/c/.config/kt");
  ::setenv("HOME", home.c_str(), 1);
}

TEST(Home, NearestNameCountsSwapsAsOne) {
  EXPECT_EQ(nearest_name("server.prot", {"server.host", "server.port"}), "server.port");
  EXPECT_EQ(nearest_name("chat.temp", {"chat.temperature", "model.paths"}), "chat.temperature");
  EXPECT_EQ(nearest_name("x", {}), "");
}

TEST_F(SettingsTest, DefaultsOfEveryKeyAreReadable) {
  const Settings settings = load_settings();
  for (const Setting& setting : known_settings()) EXPECT_FALSE(settings.is_set(setting.name)) << setting.name;
  EXPECT_EQ(settings.text("server.host"), "127.0.0.1");
  EXPECT_EQ(settings.integer("server.port"), 30000);
  EXPECT_DOUBLE_EQ(settings.number("chat.temperature"), 0.7);
  EXPECT_EQ(settings.bytes("run.max-memory"), 0u);
  EXPECT_TRUE(settings.list("model.paths").empty());
}

TEST_F(SettingsTest, WhatIsWrittenIsReadBack) {
  change_settings({{"server.port", 8080},
                   {"chat.system", "a: 'b' #c\nd"},
                   {"run.max-memory", "8GiB"},
                   {"chat.temperature", 1.5}});
  EXPECT_TRUE(add_to_setting("model.paths", "/a b"));
  EXPECT_FALSE(add_to_setting("model.paths", "/a b"));
  const Settings settings = load_settings();
  EXPECT_EQ(settings.integer("server.port"), 8080);
  EXPECT_EQ(settings.text("chat.system"), "a: 'b' #c\nd");
  EXPECT_EQ(settings.bytes("run.max-memory"), uint64_t{8} << 30);
  EXPECT_DOUBLE_EQ(settings.number("chat.temperature"), 1.5);
  EXPECT_EQ(settings.list("model.paths"), std::vector<std::string>{"/a b"});
  change_settings({{"server.port", nullptr}});
  EXPECT_FALSE(load_settings().is_set("server.port"));
  EXPECT_TRUE(remove_from_setting("model.paths", "/a b"));
  EXPECT_FALSE(remove_from_setting("model.paths", "/a b"));
}

TEST_F(SettingsTest, TheFileIsTheOwnersAndExplainsItself) {
  change_settings({{"server.api-key", "secret"}});
  struct stat facts{};
  ASSERT_EQ(::stat(settings_path().c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600u);
  std::ifstream file(settings_path());
  std::string line;
  std::getline(file, line);
  EXPECT_TRUE(line.starts_with("# ")) << line;
}

TEST_F(SettingsTest, ErrorsNameFileKeyAndTheNearestOne) {
  put("server:\n  prot: 1\n");
  EXPECT_EQ(load_error(),
            settings_path() + ": unknown key 'server.prot'; the nearest known one is server.port");
  put("sever:\n  port: 1\n");
  EXPECT_NE(load_error().find("'sever.port'; the nearest known one is server.port"), std::string::npos);
  put("port: 1\n");
  EXPECT_NE(load_error().find("'port'; the nearest"), std::string::npos);
  put("server:\n  port: '80'\n");
  EXPECT_EQ(load_error(), settings_path() + ": server.port: expected an integer, found text (\"80\")");
  put("server:\n  port: 70000\n");
  EXPECT_NE(load_error().find("expected an integer from 0 to 65535, found 70000"), std::string::npos);
  put("server: 3\n");
  EXPECT_NE(load_error().find("server: expected a mapping"), std::string::npos);
  put("run:\n  kv: int3\n");
  EXPECT_NE(load_error().find("expected one of bf16|int8|f32, found 'int3'"), std::string::npos);
  put("run:\n  max-memory: 8 elephants\n");
  EXPECT_NE(load_error().find("run.max-memory: expected a size"), std::string::npos);
  put("- a\n");
  EXPECT_NE(load_error().find("expected a mapping of keys to values, found a list"), std::string::npos);
  put("model:\n  paths: [1]\n");
  EXPECT_NE(load_error().find("model.paths: expected a list of texts"), std::string::npos);
}

TEST_F(SettingsTest, AKeyIsNotShownInErrors) {
  put("server:\n  api-key: 12345\n");
  EXPECT_EQ(load_error().find("12345"), std::string::npos) << load_error();
}

TEST_F(SettingsTest, EmptySectionsAndFilesAreDefaults) {
  put("");
  EXPECT_EQ(load_settings().integer("server.port"), 30000);
  put("# nothing\nserver:\n");
  EXPECT_EQ(load_settings().integer("server.port"), 30000);
  put("server:\n  port:\n");
  EXPECT_EQ(load_settings().integer("server.port"), 30000);
}

TEST_F(SettingsTest, AFileWithMistakesIsNotWrittenOver) {
  put("server:\n  prot: 1\n");
  EXPECT_NE(error_of([] { change_settings({{"server.port", 1}}); }), "no error");
  EXPECT_EQ(read_mapping(settings_path()), (Json{{"server", {{"prot", 1}}}}));
}

TEST_F(SettingsTest, ValuesAreCheckedBeforeTheyAreWritten) {
  EXPECT_NE(error_of([] { change_settings({{"server.port", -1}}); }), "no error");
  EXPECT_FALSE(load_settings().is_set("server.port"));
  EXPECT_NE(error_of([] { setting_from_string(setting_named("server.port"), "12x"); }), "no error");
  EXPECT_NE(error_of([] { setting_from_string(setting_named("chat.temperature"), "nan"); }), "no error");
}

TEST_F(SettingsTest, WritersDoNotLoseEachOthersUpdates) {
  std::vector<std::thread> writers;
  for (int t = 0; t < 4; ++t)
    writers.emplace_back([t] {
      for (int i = 0; i < 8; ++i) add_to_setting("model.paths", "/" + std::to_string(t * 8 + i));
    });
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(load_settings().list("model.paths").size(), 32u);
}

TEST_F(SettingsTest, ALinkToTheFileStaysOne) {
  const std::string real = folder_.put("elsewhere/my.yaml", "server:\n  port: 1\n");
  std::filesystem::create_directories(kt_home());
  std::filesystem::create_symlink(real, settings_path());
  change_settings({{"server.port", 2}});
  EXPECT_TRUE(std::filesystem::is_symlink(settings_path()));
  EXPECT_EQ(read_mapping(real)["server"]["port"], 2);
}

}  // namespace
}  // namespace kt::inline cli
