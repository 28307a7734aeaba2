#include "cli/registry/registry.h"

#include <gtest/gtest.h>

#include "cli/home.h"
#include "weights/testing/files.h"

namespace kt::inline cli {
namespace {

namespace fs = std::filesystem;

class RegistryTest : public ::testing::Test {
 protected:
  RegistryTest() : before_(fs::current_path()) {
    ::setenv("KT_HOME", folder_.at("home").c_str(), 1);
    ::setenv("KT_DEMO_MODEL", folder_.at("the-demo").c_str(), 1);
    folder_.put("the-demo/config.json", "{}");
    folder_.put("here/note", "");
    fs::current_path(folder_.at("here"));
  }
  ~RegistryTest() override {
    fs::current_path(before_);
    ::unsetenv("KT_HOME");
    ::unsetenv("KT_DEMO_MODEL");
  }
  void put(std::string_view characters) { folder_.put("home/models.yaml", characters); }

  testing_files::TempFolder folder_;
  fs::path before_;
};

ModelEntry entry(const std::string& name, const std::string& path) {
  return {.name = name, .path = path, .kind = "folder"};
}

TEST_F(RegistryTest, EntriesComeBackAsTheyWere) {
  ModelEntry one = entry("qwen3-30b", "/data/Qwen 3");
  one.architecture = "Qwen3MoeForCausalLM";
  one.size = uint64_t{61} << 30;
  one.experts = 128;
  one.active = 8;
  one.weights = "/data/w";
  one.gpu = "/data/g";
  put_models({one, entry("a", "/a.gguf")});
  const std::vector<ModelEntry> all = registered_models();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].name, "a");
  const ModelEntry& back = all[1];
  EXPECT_EQ(back.path, one.path);
  EXPECT_EQ(back.size, one.size);
  EXPECT_EQ(back.experts, 128);
  EXPECT_EQ(back.active, 8);
  EXPECT_EQ(back.weights, "/data/w");
  EXPECT_EQ(back.gpu, "/data/g");
  EXPECT_EQ(back.added.size(), 10u);
  EXPECT_TRUE(remove_model("a"));
  EXPECT_FALSE(remove_model("a"));
  EXPECT_EQ(registered_models().size(), 1u);
}

TEST_F(RegistryTest, MistakesInTheFileAreNamed) {
  const auto error = [] { return error_of([] { registered_models(); }); };
  put("models:\n  m:\n    paht: /a\n");
  EXPECT_EQ(error(), registry_path() + ": m: unknown key 'paht'; the nearest known one is path");
  put("models:\n  m:\n    kind: folder\n");
  EXPECT_NE(error().find("m: path: expected"), std::string::npos);
  put("models:\n  m:\n    path: /a\n    size: big\n");
  EXPECT_NE(error().find("size: expected an integer of at least 0, found text"), std::string::npos);
  put("model:\n  m: 1\n");
  EXPECT_NE(error().find("unknown key 'model'"), std::string::npos);
  put("models:\n  - a\n");
  EXPECT_NE(error().find("found a list"), std::string::npos);
  EXPECT_NE(error_of([] { put_models({entry("b", "/b")}); }), "no error");  // and stays as it is
}

TEST_F(RegistryTest, NamesAreWords) {
  for (const char* name : {"", "-a", ".a", "a/b", "a b", "demo", "Demo"})
    EXPECT_NE(error_of([&] { check_model_name(name); }), "no error") << name;
  for (const char* name : {"a", "Qwen3-30B_A3B.v2", "7b"}) check_model_name(name);
}

TEST_F(RegistryTest, ResolvesInOrder) {
  put_models({entry("qwen3-30b", "/q30"), entry("qwen3-235b", "/q235"), entry("m2", "/m2"),
              entry("m2-big", "/m2big")});
  EXPECT_EQ(resolve_model("m2"), "/m2") << "the whole name before longer ones";
  EXPECT_EQ(resolve_model("M2-BIG"), "/m2big");
  EXPECT_EQ(resolve_model("qwen3-2"), "/q235");
  EXPECT_EQ(find_model("qwen3-30").name, "qwen3-30b");
  EXPECT_EQ(resolve_model("demo"), folder_.at("the-demo"));
  EXPECT_EQ(resolve_model("de"), folder_.at("the-demo"));
  EXPECT_NE(error_of([] { find_model("qwen3"); }).find("qwen3-235b, qwen3-30b"), std::string::npos);
  const std::string unknown = error_of([] { find_model("llama"); });
  EXPECT_TRUE(unknown.starts_with("no model named 'llama': known are demo, m2, m2-big,")) << unknown;
  EXPECT_NE(unknown.find("kt model add NAME PATH"), std::string::npos);
  EXPECT_FALSE(try_find_model("").has_value());
}

TEST_F(RegistryTest, AnExistingModelWinsOverAName) {
  put_models({entry("m2", "/m2")});
  folder_.put("here/m2/config.json", "{}");
  EXPECT_EQ(resolve_model("m2"), "m2");
  EXPECT_EQ(find_model("m2").name, "");
}

TEST_F(RegistryTest, AFolderThatIsNoModelGivesWay) {
  folder_.put("here/demo/README.md", "");
  EXPECT_EQ(resolve_model("demo"), folder_.at("the-demo"));
  EXPECT_EQ(resolve_model("./demo"), "./demo");
  folder_.put("here/other/README.md", "");
  EXPECT_EQ(resolve_model("other"), "other") << "no name: whoever opens it says what is wrong";
}

TEST_F(RegistryTest, PathsPassThrough) {
  EXPECT_EQ(resolve_model("./nowhere"), "./nowhere");
  EXPECT_EQ(resolve_model("/no/where.gguf"), "/no/where.gguf");
}

TEST_F(RegistryTest, AbsentDemoSaysWhereItLooked) {
  ::setenv("KT_DEMO_MODEL", "/no/where", 1);
  EXPECT_NE(error_of([] { demo_path(); }).find("/no/where"), std::string::npos);
  ::unsetenv("KT_DEMO_MODEL");
}

TEST_F(RegistryTest, LinksComeWithTheName) {
  ModelEntry one = entry("m", "/m");
  one.weights = "/w";
  put_models({one});
  EXPECT_EQ(find_model("m").weights, "/w");
}

}  // namespace
}  // namespace kt::inline cli
