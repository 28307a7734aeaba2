// The seeds of fuzz/corpus, replayed: files named good-* are read, files named bad-* are an Error that names
// the file and fits a line.
#include <gtest/gtest.h>

#include "base/file.h"
#include "text/yaml.h"
#include "weights/config.h"
#include "weights/expert_statistics.h"
#include "weights/gguf/gguf.h"
#include "weights/safetensors.h"
#include "weights/testing/files.h"

namespace kt {
namespace {

using namespace testing_files;
namespace fs = std::filesystem;

template <typename Read>
void replay(const char* kind, Read&& read, std::string_view behind_name = ": ") {
  int files = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(fs::path(KT_FUZZ_CORPUS) / kind)) {
    const std::string path = entry.path().string(), name = entry.path().filename().string();
    const MappedFile file(path);
    const std::string got = error_of([&] { read(file.bytes(), path); });
    ++files;
    if (name.starts_with("good-")) {
      EXPECT_EQ(got, "no error") << path;
      continue;
    }
    ASSERT_TRUE(name.starts_with("bad-")) << path;
    EXPECT_TRUE(got.starts_with(path + std::string(behind_name))) << got;
    EXPECT_EQ(got.find('\n'), std::string::npos) << got;
  }
  EXPECT_GE(files, 10);
}

std::string_view characters(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(Corpus, Safetensors) {
  replay("safetensors", [](auto bytes, const std::string& name) { parse_safetensors(bytes, name); });
}
TEST(Corpus, Gguf) {
  replay("gguf", [](auto bytes, const std::string& name) { parse_gguf(bytes, name); });
}
TEST(Corpus, Json) {
  replay("json", [](auto bytes, const std::string& name) { parse_json(characters(bytes), name); });
}
TEST(Corpus, Config) {
  replay("config", [](auto bytes, const std::string& name) {
    read_model_config(parse_json(characters(bytes), name), name);
  });
}
TEST(Corpus, Statistics) {
  replay("statistics", [](auto bytes, const std::string& name) { parse_expert_statistics(bytes, name); });
}
TEST(Corpus, Yaml) {
  const auto read = [](auto bytes, const std::string& name) {
    const Json value = parse_yaml(characters(bytes), name);
    EXPECT_EQ(parse_yaml(to_yaml(value), "written again"), value) << name;
  };
  replay("yaml", read, ":");
}

}  // namespace
}  // namespace kt
