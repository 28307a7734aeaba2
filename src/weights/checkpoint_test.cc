#include "weights/checkpoint.h"

#include <gmock/gmock.h>

#include "weights/testing/files.h"

namespace kt::inline weights {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using namespace testing_files;
namespace fs = std::filesystem;

// A safetensors file with one U8 tensor of one byte for each name.
std::string shard(std::initializer_list<std::string_view> names) {
  std::vector<TensorSpec> specs;
  for (const std::string_view name : names) specs.push_back({std::string(name), Dtype::kU8, {1}});
  return safetensors_header(specs, {{"first", specs.empty() ? "" : specs[0].name}}) +
         std::string(names.size(), 'x');
}

std::string index_of(std::initializer_list<std::pair<std::string_view, std::string_view>> map) {
  Json out;
  for (const auto& [tensor, file] : map) out["weight_map"][std::string(tensor)] = file;
  out["metadata"]["total_size"] = 3;  // wrong, as many are
  return out.dump();
}

GgufBytes gguf_part(std::string_view architecture, std::initializer_list<std::string_view> names,
                    int part = 0, int parts = 0, int total = 0) {
  GgufBytes out(names.size(), parts > 0 ? 5 : 2);
  out.pair("general.architecture", architecture).number(std::string(architecture) + ".expert_count", 4);
  if (parts > 0)
    out.pair("split.no", 2, static_cast<uint16_t>(part))
        .pair("split.count", 2, static_cast<uint16_t>(parts))
        .pair("split.tensors.count", 5, total);
  uint64_t at = 0;
  for (const std::string_view name : names) out.tensor(name, {1}, 0, std::exchange(at, at + 32));
  return out.data(32 * names.size());
}

std::vector<std::string> names(const Checkpoint& checkpoint) {
  std::vector<std::string> out;
  for (const Tensor& t : checkpoint.tensors()) out.push_back(t.name);
  return out;
}

class Checkpoints : public testing::Test {
 protected:
  std::string message(const std::string& path) const {
    return error_of([&] { Checkpoint{path}; });
  }
  std::string message() const { return message(folder_.path()); }
  void put_indexed() const {
    folder_.put("model-00001-of-00002.safetensors", shard({"b", "a"}));
    folder_.put("model-00002-of-00002.safetensors", shard({"c"}));
    folder_.put("model.safetensors.index.json", index_of({{"a", "model-00001-of-00002.safetensors"},
                                                          {"b", "model-00001-of-00002.safetensors"},
                                                          {"c", "model-00002-of-00002.safetensors"}}));
  }
  TempFolder folder_;
};

TEST_F(Checkpoints, OneFile) {
  const std::string path = folder_.put("model.safetensors", shard({"b", "a"}));
  folder_.put("config.json", R"({"num_experts":4,"num_hidden_layers":2})");
  for (const std::string& given : {path, folder_.path()}) {
    const Checkpoint c(given);
    EXPECT_EQ(c.path(), given);
    EXPECT_EQ(c.folder(), folder_.path());
    EXPECT_FALSE(c.is_gguf());
    EXPECT_THAT(names(c), ElementsAre("a", "b"));
    EXPECT_THAT(std::vector(c.files().begin(), c.files().end()), ElementsAre(path));
    EXPECT_EQ(c.metadata(0).at("first"), "b");
    EXPECT_EQ(c.config().experts, 4);
    EXPECT_EQ(c.config_json()["num_hidden_layers"], 2);
    EXPECT_EQ(c.find("z"), nullptr);
    EXPECT_EQ(c.at("a").name, "a");
    c.check_unchanged();
  }
}

TEST_F(Checkpoints, NearestNameInErrors) {
  folder_.put("model.safetensors", shard({"model.layers.1.up", "model.layers.12.up", "lm_head"}));
  const Checkpoint c(folder_.path());
  EXPECT_EQ(error_of([&] { c.at("model.layers.1.down"); }),
            folder_.path() + ": no tensor model.layers.1.down; the nearest name is model.layers.1.up");
  EXPECT_THAT(error_of([&] { c.at("?"); }), HasSubstr("no tensor ?"));
  EXPECT_EQ(c.config_json(), Json::object());
}

TEST_F(Checkpoints, Indexed) {
  put_indexed();
  // The same weights a second time, as some repositories have them.
  folder_.put("consolidated.safetensors", shard({"a", "b", "c"}));
  folder_.put("original/consolidated.00.pth", "x");
  for (const std::string& given : {folder_.path(), folder_.at("model.safetensors.index.json")}) {
    const Checkpoint c(given);
    EXPECT_THAT(names(c), ElementsAre("a", "b", "c"));
    EXPECT_EQ(c.files().size(), 2u);
    EXPECT_EQ(c.at("c").file, 1);
    EXPECT_EQ(c.metadata(1).at("first"), "c");
    EXPECT_EQ(c.folder(), folder_.path());
  }
  EXPECT_THAT(names(Checkpoint(folder_.at("model-00002-of-00002.safetensors"))), ElementsAre("c"));
}

TEST_F(Checkpoints, IndexedInSubfolders) {
  folder_.put("shards/one.safetensors", shard({"a"}));
  folder_.put("shards/deep/two.safetensors", shard({"b"}));
  folder_.put("model.safetensors.index.json",
              index_of({{"a", "shards/one.safetensors"}, {"b", "shards/deep/two.safetensors"}}));
  EXPECT_THAT(names(Checkpoint(folder_.path())), ElementsAre("a", "b"));
}

TEST_F(Checkpoints, IndexNamesMissingFiles) {
  put_indexed();
  fs::remove(folder_.at("model-00001-of-00002.safetensors"));
  EXPECT_THAT(message(), AllOf(HasSubstr("1 of 2 files are missing"), HasSubstr("model-00001-of-00002")));
  fs::remove(folder_.at("model-00002-of-00002.safetensors"));
  EXPECT_THAT(message(),
              AllOf(HasSubstr("2 of 2"), HasSubstr("model-00001-of-00002.safetensors, model-00002-of")));
}

TEST_F(Checkpoints, IndexThatDisagrees) {
  put_indexed();
  folder_.put("model-00002-of-00002.safetensors", shard({"d"}));
  EXPECT_THAT(message(), HasSubstr("index.json: 1 tensors are not in the files it names: c"));
  folder_.put("model-00002-of-00002.safetensors", shard({"c", "a"}));
  EXPECT_THAT(message(), AllOf(HasSubstr("a is in two files"), HasSubstr("00001-of"), HasSubstr("00002-of")));
  folder_.put("model-00002-of-00002.safetensors", shard({"c", "extra"}));
  EXPECT_THAT(names(Checkpoint(folder_.path())), ElementsAre("a", "b", "c", "extra"));
  folder_.put("model-00001-of-00002.safetensors", shard({"b"}));
  folder_.put("model-00002-of-00002.safetensors", shard({"a", "c"}));
  EXPECT_THAT(message(), HasSubstr("says that a is in "));
}

TEST_F(Checkpoints, IndexThatIsNone) {
  folder_.put("model.safetensors", shard({"a"}));
  for (const char* bad : {"[]", "{}", "3", R"({"weight_map":[]})", R"({"weight_map":{}})"}) {
    folder_.put("model.safetensors.index.json", bad);
    EXPECT_THAT(message(), HasSubstr("index.json: expected a \"weight_map\"")) << bad;
  }
  folder_.put("model.safetensors.index.json", R"({"weight_map":{"a":1}})");
  EXPECT_THAT(message(), HasSubstr("a: expected the name of a file"));
  folder_.put("model.safetensors.index.json", R"({"weight_map":{"a":"x","a":"y"}})");
  EXPECT_THAT(message(), HasSubstr("duplicate key \"a\""));
}

TEST_F(Checkpoints, IndexCannotLeaveItsFolder) {
  const TempFolder other;
  const std::string outside = other.put("x.safetensors", shard({"a"}));
  for (const std::string& name :
       {outside, "../" + fs::path(other.path()).filename().string() + "/x.safetensors",
        std::string("sub/../../x.safetensors"), std::string(""), std::string("a\0.safetensors", 14)}) {
    folder_.put("model.safetensors.index.json", index_of({{"a", name}}));
    EXPECT_THAT(message(), HasSubstr("is not below the folder of the index")) << name;
  }
  folder_.put("model.safetensors.index.json", index_of({{"a", "config.json"}}));
  EXPECT_THAT(message(), HasSubstr("\"config.json\" is not a .safetensors file"));
}

TEST_F(Checkpoints, SeveralFilesWithoutIndex) {
  folder_.put("x.safetensors", shard({"a"}));
  folder_.put("y.safetensors", shard({"b"}));
  folder_.put("consolidated.safetensors", shard({"a", "b"}));
  EXPECT_THAT(names(Checkpoint(folder_.path())), ElementsAre("a", "b"));
  folder_.put("y.safetensors", shard({"a"}));
  EXPECT_THAT(message(), HasSubstr("a is in two files"));
}

TEST_F(Checkpoints, NumberedFilesWithoutIndex) {
  folder_.put("m-00001-of-00004.safetensors", shard({"a"}));
  folder_.put("m-00003-of-00004.safetensors", shard({"b"}));
  EXPECT_THAT(message(),
              HasSubstr("2 of 4 parts are missing: m-00002-of-00004.safetensors, m-00004-of-00004"));
}

TEST_F(Checkpoints, HubCache) {
  const std::string blob = folder_.put("blobs/5ac0", shard({"a"}));
  fs::create_directories(folder_.at("snapshots/111"));
  fs::create_symlink("../../blobs/5ac0", folder_.at("snapshots/111/model.safetensors"));
  EXPECT_THAT(names(Checkpoint(folder_.path())), ElementsAre("a"));
  EXPECT_EQ(Checkpoint(folder_.path()).folder(), folder_.at("snapshots/111"));
  EXPECT_THAT(names(Checkpoint(folder_.at("snapshots"))), ElementsAre("a"));
  folder_.put("snapshots/222/model.safetensors", shard({"b"}));
  EXPECT_THAT(message(), HasSubstr("2 snapshots and no refs/main that names one: 111, 222"));
  folder_.put("refs/main", "222\n");
  EXPECT_THAT(names(Checkpoint(folder_.path())), ElementsAre("b"));
  folder_.put("refs/main", "../111");
  EXPECT_THAT(message(), HasSubstr("no refs/main that names one"));
  fs::remove(blob);
  EXPECT_THAT(message(folder_.at("snapshots/111")), HasSubstr("model.safetensors: cannot stat"));
}

TEST_F(Checkpoints, OneFolderDown) {
  folder_.put("config.json", R"({"num_experts":4})");
  folder_.put("Q4/model.safetensors", shard({"a"}));
  folder_.put("original/model.safetensors", shard({"z"}));
  const Checkpoint c(folder_.path());
  EXPECT_THAT(names(c), ElementsAre("a"));
  EXPECT_EQ(c.config().experts, 4);
  folder_.put("Q8/model.safetensors", shard({"a"}));
  EXPECT_THAT(message(), HasSubstr("several folders hold weights, name one: Q4, Q8"));
}

TEST_F(Checkpoints, NothingToRead) {
  EXPECT_THAT(message(), HasSubstr("holds no .safetensors and no .gguf file"));
  EXPECT_THAT(message(folder_.at("none")), HasSubstr("none: no such file or folder"));
  folder_.put("pytorch_model.bin", "x");
  EXPECT_THAT(message(), HasSubstr("holds pytorch_model.bin, which is not read"));
  EXPECT_THAT(message(folder_.at("pytorch_model.bin")),
              HasSubstr("expected a folder, a .safetensors or .gguf"));
  folder_.put("a.safetensors", shard({"a"}));
  folder_.put("b.gguf", gguf_part("x", {"b"}).str());
  EXPECT_THAT(message(), HasSubstr("holds both safetensors (a.safetensors, ...) and GGUF (b.gguf, ...)"));
  EXPECT_THAT(names(Checkpoint(folder_.at("b.gguf"))), ElementsAre("b"));
}

TEST_F(Checkpoints, BadConfig) {
  folder_.put("model.safetensors", shard({"a"}));
  folder_.put("config.json", R"({"num_experts":"many"})");
  EXPECT_THAT(message(), HasSubstr("config.json: num_experts is \"many\""));
  folder_.put("config.json", "{");
  EXPECT_THAT(message(), HasSubstr("config.json: not JSON"));
}

TEST_F(Checkpoints, GgufSplit) {
  for (int i = 0; i < 3; ++i)
    folder_.put(text("m-0000{}-of-00003.gguf", i + 1),
                gguf_part("qwen3moe", {std::string(1, static_cast<char>('c' - i))}, i, 3, 3).str());
  for (const std::string& given : {folder_.path(), folder_.at("m-00002-of-00003.gguf")}) {
    const Checkpoint c(given);
    EXPECT_TRUE(c.is_gguf());
    EXPECT_THAT(names(c), ElementsAre("a", "b", "c"));
    EXPECT_EQ(c.at("a").file, 2);
    EXPECT_EQ(c.at("a").dtype, Dtype::kGguf);
    EXPECT_EQ(c.config().experts, 4);
    EXPECT_EQ(c.config().model_type, "qwen3moe");
    EXPECT_EQ(c.gguf_family(), nullptr);
    EXPECT_TRUE(c.gguf().tensors.empty());
    EXPECT_TRUE(c.metadata(2).empty());
  }
  static constexpr GgufFamily kFamily{.gguf = "qwen3moe", .model_type = "a type", .architecture = "A"};
  const GgufFamily* const families[] = {&kFamily};
  const Checkpoint of_a_family(folder_.path(), families);
  EXPECT_EQ(of_a_family.gguf_family(), &kFamily);
  EXPECT_EQ(of_a_family.config().model_type, "a type");
  EXPECT_EQ(of_a_family.config().architecture, "A");
  fs::rename(folder_.at("m-00001-of-00003.gguf"), folder_.at("away"));
  const auto missing = HasSubstr("1 of 3 parts are missing: m-00001-of-00003.gguf");
  EXPECT_THAT(message(), missing);
  EXPECT_THAT(message(folder_.at("m-00003-of-00003.gguf")), missing);
  EXPECT_THAT(message(folder_.at("m-00001-of-00003.gguf")), missing);
  fs::rename(folder_.at("m-00003-of-00003.gguf"), folder_.at("m-00001-of-00003.gguf"));
  fs::copy(folder_.at("away"), folder_.at("m-00003-of-00003.gguf"));
  EXPECT_THAT(message(), HasSubstr("says it is part 3 of 3, its name says 1 of 3"));
}

TEST_F(Checkpoints, GgufSplitCountsOfTheWrongKind) {
  folder_.put("m.gguf", GgufBytes(0, 2).pair("general.architecture", "x").pair("split.count", "3").str());
  EXPECT_THAT(message(), HasSubstr("m.gguf: split.count is \"3\", expected a whole number of at least 0"));
  folder_.put("m.gguf",
              GgufBytes(0, 2).pair("general.architecture", "x").pair("split.no", 5, int32_t{-1}).str());
  EXPECT_THAT(message(), HasSubstr("m.gguf: split.no is -1, expected"));
}

TEST_F(Checkpoints, GgufPartsThatLackTensors) {
  folder_.put("m-00001-of-00002.gguf", gguf_part("x", {"a"}, 0, 2, 3).str());
  folder_.put("m-00002-of-00002.gguf", gguf_part("x", {"b"}, 1, 2, 3).str());
  EXPECT_THAT(message(), HasSubstr("split.tensors.count is 3, the 2 parts hold 2 tensors"));
  const std::string renamed = folder_.put("other.gguf", gguf_part("x", {"b"}, 1, 2, 3).str());
  EXPECT_THAT(message(renamed), HasSubstr("part 2 of 2 of a split model, under a name"));
}

TEST_F(Checkpoints, GgufFilesWithoutNumbers) {
  folder_.put("a.gguf", gguf_part("x", {"a"}).str());
  folder_.put("b.gguf", gguf_part("x", {"b"}).str());
  EXPECT_THAT(names(Checkpoint(folder_.path())), ElementsAre("a", "b"));
  folder_.put("mmproj.gguf", gguf_part("clip", {"a"}).str());
  const Checkpoint c(folder_.path());
  EXPECT_EQ(c.files().size(), 2u);
  EXPECT_EQ(c.at("b").file, 1);
  c.check_unchanged();
  folder_.put("c.gguf", gguf_part("x", {"b"}).str());
  EXPECT_THAT(message(), HasSubstr("several GGUF models, name one: a.gguf, b.gguf, c.gguf"));
  folder_.put("c.gguf", gguf_part("y", {"c"}).str());
  EXPECT_THAT(message(), HasSubstr("several GGUF models"));
}

TEST_F(Checkpoints, NoticesChanges) {
  put_indexed();
  const std::string file = folder_.at("model-00001-of-00002.safetensors");
  const auto change = [&](auto&& how) {
    const Checkpoint c(folder_.path());
    c.check_unchanged();
    how();
    return error_of([&] { c.check_unchanged(); });
  };
  EXPECT_THAT(change([&] { fs::last_write_time(file, fs::last_write_time(file) + std::chrono::seconds(1)); }),
              HasSubstr("model-00001-of-00002.safetensors: was replaced or rewritten"));
  EXPECT_THAT(change([&] { write_atomically(file, shard({"b", "a"})); }),
              HasSubstr("was replaced or rewritten"));
  EXPECT_THAT(change([&] { std::ofstream(file, std::ios::app) << "more"; }), HasSubstr("bytes, it had"));
  folder_.put("model-00001-of-00002.safetensors", shard({"b", "a"}));
  EXPECT_THAT(change([&] { fs::remove(file); }), HasSubstr("cannot stat"));
}

TEST_F(Checkpoints, Move) {
  put_indexed();
  Checkpoint a(folder_.path());
  Checkpoint b(std::move(a));
  EXPECT_THAT(names(b), ElementsAre("a", "b", "c"));
}

}  // namespace
}  // namespace kt::inline weights
