#include "hub/repository.h"

#include <gmock/gmock.h>

#include "base/testing/error_of.h"

namespace kt::inline hub {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<HubFile> named(std::initializer_list<const char*> paths) {
  std::vector<HubFile> out;
  for (const char* path : paths) out.push_back({.path = path});
  return out;
}

std::vector<std::string> paths(const std::vector<HubFile>& files) {
  std::vector<std::string> out;
  for (const HubFile& file : files) out.push_back(file.path);
  return out;
}

TEST(Repository, Names) {
  const auto repo = parse_repo("Qwen/Qwen3-30B-A3B");
  ASSERT_TRUE(repo);
  EXPECT_EQ(repo->folder(), "models--Qwen--Qwen3-30B-A3B");
  EXPECT_EQ(parse_repo("wikitext", RepoKind::kDataset)->folder(), "datasets--wikitext");
  for (const char* repo_id :
       {"", "a", "a/", "/b", "a/b/c", "a b/c", "../b", "a/..", "-a/b", "a/b-", "a--b/c", "a/b:c", "a/b\n"})
    EXPECT_FALSE(parse_repo(repo_id)) << repo_id;
}

TEST(Repository, ReferencesOfModels) {
  EXPECT_EQ(parse_model_reference("a/b:Q4/c.gguf")->file, "Q4/c.gguf");
  EXPECT_EQ(parse_model_reference("a/b")->str(), "a/b");
  for (const char* reference : {"a/b.gguf", "a/b.safetensors", "a/b:c", "a/b:", "a:b.gguf"})
    EXPECT_FALSE(parse_model_reference(reference)) << reference;
  EXPECT_THAT(error_of([] { parse_model_reference("a/b:../c.gguf"); }), HasSubstr("not below"));
}

TEST(Repository, PathsStayBelow) {
  check_repo_path("a/b c/été.txt", "x");
  for (const std::string& path :
       {std::string(""), std::string("/a"), std::string("a/"), std::string("a//b"), std::string(".."),
        std::string("a/../b"), std::string("./a"), std::string("a\nb"), std::string("a\0b", 3),
        std::string("a\\b"), std::string("\xff"), std::string(201, 'a')})
    EXPECT_THAT(error_of([&] { check_repo_path(path, "x"); }), HasSubstr("refused")) << path;
}

TEST(Repository, Revisions) {
  for (const char* revision : {"main", "v1.0", "refs/pr/3", "0123abc"}) check_revision(revision);
  for (const char* revision : {"", "..", "a/../b", "/a", "a/", "a b", "a\nb", ".git", "a?b"})
    EXPECT_THAT(error_of([&] { check_revision(revision); }), HasSubstr("revision")) << revision;
}

TEST(Repository, Patterns) {
  EXPECT_TRUE(matches_pattern("a/b.json", "*.json"));
  EXPECT_TRUE(matches_pattern("a/b.json", "a/"));
  EXPECT_FALSE(matches_pattern("ab.json", "a/"));
  EXPECT_FALSE(matches_pattern("b.json", "*.txt"));
}

TEST(Repository, SetsOfGguf) {
  const auto files =
      named({"x-Q4.gguf", "Q8/x-00001-of-00002.gguf", "Q8/x-00002-of-00002.gguf", "mmproj.gguf", "a.json"});
  EXPECT_THAT(gguf_models(files), ElementsAre("Q8/x-00001-of-00002.gguf", "x-Q4.gguf"));
  EXPECT_THAT(paths(gguf_set(files, "x-Q4.gguf", "r")), ElementsAre("x-Q4.gguf"));
  EXPECT_THAT(paths(gguf_set(files, "x-00002-of-00002.gguf", "r")),
              ElementsAre("Q8/x-00001-of-00002.gguf", "Q8/x-00002-of-00002.gguf"));
  EXPECT_TRUE(gguf_set(files, "y.gguf", "r").empty());
  EXPECT_THAT(error_of([] { gguf_set(named({"a/x.gguf", "b/x.gguf"}), "x.gguf", "r"); }),
              HasSubstr("several folders"));
}

}  // namespace
}  // namespace kt::inline hub
