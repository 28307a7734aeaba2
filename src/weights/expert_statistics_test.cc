// Statistics as files have them: what is summed, what is refused and how. Torch's files are those that torch wrote into
// fuzz/corpus; tests/placement_test.py has it write more.
#include "weights/expert_statistics.h"

#include <gmock/gmock.h>

#include <random>

#include "base/file.h"
#include "weights/testing/files.h"

namespace kt::inline weights {
namespace {

using namespace testing_files;
using testing::AllOf;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

ExpertStatistics of_text(std::string_view characters) {
  return parse_expert_statistics(bytes_of(characters), "f");
}
std::string refusal(std::string_view characters) {
  return error_of([&] { of_text(characters); });
}
std::string seed(const std::string& name) {
  return read_file(std::string(KT_FUZZ_CORPUS) + "/statistics/" + name, 1 << 20);
}

TEST(ExpertStatistics, TablesAndStepsOfJson) {
  const ExpertStatistics table = of_text(R"({"rank": 0, "logical_count": [[1, 2, 3], [4, 5, 6]]})");
  EXPECT_EQ(table.layers, 2);
  EXPECT_EQ(table.experts, 3);
  EXPECT_THAT(table.counts, ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_EQ(table.at(1, 0), 4);
  const ExpertStatistics steps = of_text("[[[1, 2.0]], [[3, 4e2]]]");
  EXPECT_EQ(steps.layers, 1);
  EXPECT_THAT(steps.counts, ElementsAre(4, 402));
}

TEST(ExpertStatistics, TensorsOfTorch) {
  EXPECT_EQ(of_text(seed("good-recorded")),
            (ExpertStatistics{.layers = 2, .experts = 3, .counts = {6, 8, 10, 12, 14, 16}}));
  EXPECT_EQ(of_text(seed("good-alone")),  // a transposed view
            (ExpertStatistics{.layers = 2, .experts = 3, .counts = {0, 2, 4, 1, 3, 5}}));
  EXPECT_EQ(of_text(seed("good-uint64")),
            (ExpertStatistics{.layers = 1, .experts = 2, .counts = {1, INT64_MAX}}));
  EXPECT_EQ(of_text(seed("good-more")), (ExpertStatistics{.layers = 1, .experts = 2, .counts = {1, 1}}));
}

TEST(ExpertStatistics, WhatIsNoTableIsNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"counts": 1, "rank": 0})", "f: no logical_count; the file has counts, rank"},
      {"{}", "f: no logical_count; the file has no keys"},
      {R"({"logical_count": [1, 2]})",
       "f: expected logical_count [layers, experts] or [steps, layers, experts], has shape [2]"},
      {R"({"logical_count": 7})",
       "f: expected logical_count [layers, experts] or [steps, layers, experts], has shape []"},
      {R"({"logical_count": [[], []]})", "f: logical_count of shape [2, 0]: expected 1 to 16777216 counts"},
      {R"({"logical_count": [[1], [2, 3]]})",
       "f: no table: before count 1 stands a list of 2, expected a list of 1"},
      {R"({"logical_count": [[1, 2], 3]})", "f: no table: before count 2 stands 3, expected a list of 2"},
      {"[[1, -4]]", "f: logical_count[0, 1]: expected a count up to 9223372036854775807, has -4"},
      {"[[[1], [true]]]", "f: logical_count[0, 1, 0]: expected a count up to 9223372036854775807, has true"},
      {"[[1, 9223372036854775808]]",
       "f: logical_count[0, 1]: expected a count up to 9223372036854775807, has 9223372036854775808"},
      {"[[0.5]]", "f: logical_count[0, 0]: counts are whole numbers, this is 0.5"},
      {"[[[9223372036854775807]], [[1]]]",
       "f: the counts of expert 0 of layer 0 add up to more than 9223372036854775807"},
  };
  for (const auto& [file, line] : cases) EXPECT_EQ(refusal(file), line);
  EXPECT_THAT(refusal("[[1, 2"), StartsWith("f: "));
  EXPECT_THAT(refusal(""), StartsWith("f: "));
}

// What Python could read has the line that makes JSON of it, what is damaged has not.
TEST(ExpertStatistics, WhatOnlyPythonReadsIsRefusedWithTheLine) {
  constexpr const char* kLine =
      "; if you trust it, this makes JSON of it: python3 -c \"import json, torch; t = torch.load('FILE.pt', "
      "'cpu', "
      "weights_only=False)['logical_count']; json.dump({'logical_count': "
      "torch.as_tensor(t).to_dense().tolist()}, "
      "open('FILE.json', 'w'))\"";
  const std::pair<const char*, const char*> cases[] = {
      {"bad-device", "f: it holds torch.device"},
      {"bad-old", "f: a torch file in the order of versions before 1.6"},
      {"bad-protocol", "f: a pickle of protocol 4, 2 is read here"},
      {"bad-sparse", "f: it holds torch._utils._rebuild_sparse_tensor"},
      {"bad-big-endian", "f: numbers in big order"},
      {"bad-calls", "f: it holds posix.system"},
  };
  for (const auto& [name, what] : cases) EXPECT_EQ(refusal(seed(name)), std::string(what) + kLine);
  EXPECT_THAT(refusal(seed("bad-compressed")), AllOf(HasSubstr(" is compressed; "), EndsWith(kLine)));
  const std::pair<const char*, const char*> damaged[] = {
      {"bad-cut", "f: a zip archive without its directory at the end: cut off or damaged"},
      {"bad-no-pickle", "f: a zip archive without data.pkl: not written by torch.save"},
      {"bad-no-storage", "f: no entry data/0, where the numbers of a tensor are"},
      {"bad-short-storage", "f: data/0 has 20 bytes, expected 12 numbers of 4"},
      {"bad-no-counts", "f: no logical_count; the file has rank, counts"},
      {"bad-fractions", "f: logical_count[0, 0]: counts are whole numbers, this is 0.5"},
  };
  for (const auto& [name, what] : damaged) EXPECT_EQ(refusal(seed(name)), what);
}

// Every beginning of a file, and 500 files with some bytes changed: read or refused in a line.
TEST(ExpertStatistics, DamagedFilesAreReadOrRefused) {
  std::mt19937 random(7);
  int refused = 0;
  const auto check = [&](const std::string& file) {
    const std::string line = refusal(file);
    if (line == "no error") return;
    ++refused;
    ASSERT_TRUE(line.starts_with("f: ")) << line;
    ASSERT_EQ(line.find('\n'), line.npos) << line;
    ASSERT_LT(line.size(), 1000u) << line;
  };
  for (const char* name : {"good-recorded", "good-alone", "good-uint64", "good-more", "good-table.json"}) {
    const std::string whole = seed(name);
    for (size_t bytes = 0; bytes < whole.size(); ++bytes) check(whole.substr(0, bytes));
    EXPECT_EQ(refused, static_cast<int>(whole.size()));
    for (int i = 0; i < 100; ++i) {
      std::string changed = whole;
      for (uint32_t many = 1 + random() % 4; many > 0; --many)
        changed[random() % changed.size()] = static_cast<char>(random() % 3 == 0 ? 0xff : random());
      check(changed);
    }
    EXPECT_GT(refused, static_cast<int>(whole.size()));
    refused = 0;
  }
}

TEST(ExpertStatistics, FilesAreNamed) {
  const TempFolder folder;
  const std::string path = folder.put("counts.json", "[[1, 2]]");
  EXPECT_EQ(read_expert_statistics(path).experts, 2);
  EXPECT_THAT(error_of([&] { read_expert_statistics(folder.at("absent")); }), HasSubstr(folder.at("absent")));
  EXPECT_THAT(error_of([&] { read_expert_statistics(folder.path()); }), HasSubstr(folder.path()));
}

}  // namespace
}  // namespace kt::inline weights
