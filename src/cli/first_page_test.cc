#include "cli/first_page.h"

#include <gmock/gmock.h>

#include <sstream>

#include "cli/chinese_words.h"
#include "terminal/terminal_text.h"

namespace kt::inline cli {
namespace {

using testing::HasSubstr;

std::vector<std::string> lines_of(const std::string& page) {
  std::istringstream in(page);
  std::vector<std::string> out;
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

std::vector<std::string> commands_of(const std::vector<FirstPage::Step>& steps) {
  std::vector<std::string> out;
  for (const FirstPage::Step& step : steps) out.push_back(step.command);
  return out;
}

FirstPage made_page() {
  return {.version = "1.2.3",
          .machine = {{"CPU", "Intel(R) Xeon(R) Platinum 8488C, 96 cores on 2 NUMA nodes, amx kernels"},
                      {"RAM", "512 GiB available"},
                      {"GPU", "none: everything runs on the CPU"}},
          .models = {{"demo", "1.2 MiB, comes with kt"}, {"qwen3-30b", "57 GiB, Qwen3MoeForCausalLM"}},
          .more_models = 3,
          .steps = first_steps({{"demo", 1}, {"qwen3-30b", 57}, {"r1", 700}}, 512)};
}

TEST(FirstPage, BeginsWithTheLargestModelThatFits) {
  EXPECT_THAT(commands_of(first_steps({{"demo", 1}, {"big", 57}, {"r1", 700}}, 512)),
              testing::ElementsAre("kt chat big", "kt run big", "kt estimate r1"));
  EXPECT_THAT(commands_of(first_steps({{"demo", 1}}, 512)),
              testing::ElementsAre("kt chat demo", "kt run demo", "kt doctor"));
  EXPECT_THAT(commands_of(first_steps({}, 512)),
              testing::ElementsAre("kt doctor", "kt model scan . --add", "kt --help"));
  EXPECT_THAT(commands_of(first_steps({{"r1", 700}}, 512)),
              testing::ElementsAre("kt estimate r1", "kt doctor", "kt model scan . --add"));
}

TEST(FirstPage, KeepsWithinItsColumns) {
  for (const int width : {40, 59, 60, 80, 200})
    for (const std::string& line : lines_of(shown_page(made_page(), width)))
      EXPECT_LE(text_width(line), width) << line;
}

TEST(FirstPage, KeepsWithinItsColumnsInChinese) {
  speak(chinese_words());
  FirstPage page = made_page();
  page.machine = first_page().machine;
  for (const int width : {40, 59, 60, 80, 200})
    for (const std::string& line : lines_of(shown_page(page, width)))
      EXPECT_LE(text_width(line), width) << line;
  EXPECT_THAT(shown_page(page, 80), HasSubstr("\n试试\n  kt chat qwen3-30b  在这里与它对话\n"));
  EXPECT_THAT(shown_page(page, 40), HasSubstr("\n  kt run qwen3-30b\n      启动服务：OpenAI API 和网页\n"));
  speak({});
}

TEST(FirstPage, SideBySideWhereThereIsRoom) {
  const std::string page = shown_page(made_page(), 80);
  EXPECT_THAT(page,
              HasSubstr("\nCPU   Intel(R) Xeon(R) Platinum 8488C, 96 cores on 2 NUMA nodes, amx kernels\n"));
  EXPECT_THAT(page, HasSubstr("\n  demo       1.2 MiB, comes with kt\n"));
  EXPECT_THAT(page, HasSubstr("\n  kt chat qwen3-30b  talk to it here\n"));
  EXPECT_THAT(page, HasSubstr("and 3 more: kt model list"));
}

TEST(FirstPage, BelowEachOtherWhereThereIsNot) {
  const std::string page = shown_page(made_page(), 40);
  EXPECT_THAT(
      page,
      HasSubstr(
          "\nCPU   Intel(R) Xeon(R) Platinum 8488C,\n      96 cores on 2 NUMA nodes, amx\n      kernels\n"));
  EXPECT_THAT(page, HasSubstr("\n  qwen3-30b\n      57 GiB, Qwen3MoeForCausalLM\n"));
  EXPECT_THAT(page, HasSubstr("\n  kt run qwen3-30b\n      serve it: OpenAI's API and a web\n      page\n"));
}

TEST(FirstPage, OfThisMachineHasAllItsParts) {
  const FirstPage page = first_page();
  ASSERT_EQ(page.machine.size(), 3u);
  EXPECT_THAT(page.machine[0].value, HasSubstr(" kernels"));
  EXPECT_EQ(page.steps.size(), 3u);
}

}  // namespace
}  // namespace kt::inline cli
