#include "hub/hub_client.h"

#include <gmock/gmock.h>

#include "base/testing/error_of.h"
#include "hub/download.h"

namespace kt::inline hub {
namespace {

using ::testing::HasSubstr;

const std::string kSum(64, 'a'), kSha1(40, 'b');

TEST(HubAnswers, Trees) {
  const auto files = files_of_tree(text(R"([{"type": "directory", "path": "d"},
      {"type": "file", "path": "b", "size": 3, "oid": "{}"},
      {"type": "file", "path": "a", "size": 9, "oid": "x", "lfs": {"oid": "{}", "size": 7} }])",
                                        kSha1, kSum),
                                   "hub");
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].path, "a");
  EXPECT_EQ(files[0].size, 7u);
  EXPECT_EQ(files[0].sha256, kSum);
  EXPECT_EQ(files[1].sum(), kSha1);
}

TEST(HubAnswers, TreesThatAreNone) {
  for (const std::string& answer : {std::string("{}"), std::string("[1]"), std::string("["),
                                    std::string(R"([{"type": "file", "path": "../a", "size": 1}])"),
                                    std::string(R"([{"type": "file", "path": "a", "size": -1, "oid": ""}])"),
                                    std::string(R"([{"type": "file", "path": "a", "size": 1, "oid": "zz"}])"),
                                    text(R"([{"type": "file", "path": "a", "size": 1, "oid": "{}"}, )"
                                         R"({"type": "file", "path": "a", "size": 1, "oid": "{}"}])",
                                         kSha1, kSha1)})
    EXPECT_THAT(error_of([&] { files_of_tree(answer, "hub"); }), HasSubstr("hub")) << answer;
}

TEST(HubAnswers, Commits) {
  EXPECT_EQ(commit_of_answer(text(R"({"sha": "{}"})", kSha1), "hub"), kSha1);
  for (const char* answer : {"[]", "{}", R"({"sha": "../../x"})", R"({"sha": 3})"})
    EXPECT_THAT(error_of([&] { commit_of_answer(answer, "hub"); }), HasSubstr("sha")) << answer;
}

TEST(HubAnswers, ModelScope) {
  const auto files =
      files_of_modelscope(text(R"({"Data": {"Files": [{"Type": "tree", "Path": "d"}, )"
                               R"({"Type": "blob", "Path": "a", "Size": 2, "Sha256": "{}"}]} })",
                               kSum),
                          "hub");
  ASSERT_EQ(files.size(), 1u);
  EXPECT_EQ(files[0].sha256, kSum);
  EXPECT_THAT(error_of([] { files_of_modelscope(R"({"Code": 1, "Message": "no such model"})", "hub"); }),
              HasSubstr("no such model"));
}

TEST(Web, Origins) {
  EXPECT_EQ(origin_of("HTTPS://Hub.co:443/a?b"), "https://hub.co");
  EXPECT_EQ(origin_of("http://hub.co:8080"), "http://hub.co:8080");
  EXPECT_NE(origin_of("https://hub.co.evil.com/"), origin_of("https://hub.co/"));
  for (const char* url : {"", "hub.co", "ftp://hub.co", "https://", "https://hub.co@evil.com/",
                          "https://a\\b/", "https://a b/"})
    EXPECT_EQ(origin_of(url), "") << url;
  EXPECT_EQ(escaped("a b/%+.txt"), "a%20b/%25%2B.txt");
}

std::vector<std::string> chosen(std::initializer_list<const char*> names) {
  RepoListing listing{.repo = *parse_repo("a/b")};
  for (const char* name : names) listing.files.push_back({.path = name});
  std::vector<std::string> out;
  for (const HubFile& file : select_files(listing, {}).wanted) out.push_back(file.path);
  return out;
}

TEST(FileChoice, LeavesOutWhatIsThereTwice) {
  EXPECT_THAT(chosen({"config.json", "consolidated.safetensors", "m.safetensors", "m.gguf",
                      "original/m.safetensors", "p.bin"}),
              ::testing::ElementsAre("config.json", "m.safetensors"));
  EXPECT_THAT(chosen({"config.json", "m.gguf"}), ::testing::ElementsAre("config.json", "m.gguf"));
  EXPECT_THAT(error_of([] { chosen({"a.gguf", "b.gguf"}); }), HasSubstr("a/b:a.gguf"));
  EXPECT_THAT(error_of([] { chosen({"a.bin"}); }), HasSubstr("a.bin"));
  EXPECT_THAT(error_of([] { chosen({"a.md"}); }), HasSubstr("without weights"));
  EXPECT_THAT(error_of([] { chosen({}); }), HasSubstr("no files"));
}

}  // namespace
}  // namespace kt::inline hub
