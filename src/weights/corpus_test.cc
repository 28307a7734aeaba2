// The seeds of fuzz/corpus, replayed: files named good-* are read, files named bad-* are an Error that names
// the file and fits a line.
#include <gtest/gtest.h>

#include "base/file.h"
#include "base/testing/temp_folder.h"
#include "text/yaml.h"
#include "weights/config.h"
#include "weights/expert_statistics.h"
#include "weights/gguf/gguf.h"
#include "weights/safetensors.h"
#include "weights/testing/adapter_bytes.h"
#include "weights/testing/files.h"

namespace kt::inline weights {
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

// Read by a model, or written in another layout: one of them says what is wrong with a bad one, in a line, in this much
// memory.
TEST(Corpus, Lora) {
  static constexpr GgufFamily kQwen{.gguf = "qwen3moe"};
  static constexpr const GgufFamily* kAll[] = {&kQwen};
  int files = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(fs::path(KT_FUZZ_CORPUS) / "lora")) {
    const std::string name = entry.path().filename().string();
    const TempFolder folder, out;
    const MappedFile file(entry.path().string());
    const std::string path = write_adapter(folder.path(), characters(file.bytes()));
    const std::string read = error_of([&] { read_adapter_whole(path, kAll); });
    std::string moved = "no error";
    if (path == folder.path())
      moved =
          error_of([&] { export_lora({.from = path, .to = out.at("out"), .layout = LoraLayout::kFused}); });
    ++files;
    for (const std::string& got : {read, moved}) {
      EXPECT_TRUE(got == "no error" || got.find(folder.path()) != got.npos) << name << ": " << got;
      EXPECT_TRUE(got.size() < 1000 && got.find('\n') == got.npos) << name << ": " << got;
    }
    if (name.starts_with("good-"))
      EXPECT_EQ(read, "no error") << name;
    else
      EXPECT_TRUE(read != "no error" || moved != "no error") << name;
  }
  EXPECT_GE(files, 25);
}

}  // namespace
}  // namespace kt::inline weights
