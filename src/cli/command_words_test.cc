#include "cli/command_words.h"

#include <gmock/gmock.h>

#include "base/error.h"
#include "cli/sglang_flags.h"

namespace kt::inline cli {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// A program with what the scanner must tell apart: flags with and without values, lists, a verb below a verb.
class CommandWordsTest : public testing::Test {
 protected:
  CommandWordsTest() : app("", "kt") {
    app.fallthrough();
    app.add_flag("--debug");
    CLI::App* const run = app.add_subcommand("run");
    run->add_option("MODEL", text_);
    run->add_option("-p,--port", number_);
    run->add_flag("-q,--quantize");
    run->add_option("--allow-host", list_);
    run->add_option("--numa-nodes", numbers_)->allow_extra_args(false);
    app.add_subcommand("quant")->add_subcommand("gpu")->add_option("-o,--output", text_);
    CLI::App* const bench = app.add_subcommand("bench");
    bench->add_option("-t,--type", text_);
    bench->add_option("-m,--model", text_);
    CLI::App* const microbench = app.add_subcommand("microbench");
    for (const char* const component : {"moe", "mla"})
      microbench->add_subcommand(component)->add_option("-n", number_);
  }

  // "flag=word,word" of each group, without the flag's own word.
  Words groups(const Words& words) {
    Words out;
    for (const WordGroup& group : told_apart(app, words).groups) {
      std::string one = group.flag.empty() ? words[group.begin] : group.flag;
      for (size_t i = group.begin + 1; i < group.end; ++i) one += "," + words[i];
      out.push_back(one);
    }
    return out;
  }

  std::string refused(Words words) {
    try {
      take_out_ignored(app, words);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  CLI::App app;

 private:
  std::string text_;
  int number_ = 0;
  std::vector<std::string> list_;
  std::vector<int> numbers_;
};

TEST_F(CommandWordsTest, FlagsHaveTheirValues) {
  EXPECT_THAT(groups({"run", "--port", "1", "demo"}), ElementsAre("--port,1", "demo"));
  EXPECT_THAT(groups({"run", "--port=1", "demo"}), ElementsAre("--port", "demo"));
  EXPECT_THAT(groups({"run", "-p1", "demo"}), ElementsAre("-p", "demo"));
  EXPECT_THAT(groups({"run", "-qp", "1", "demo"}), ElementsAre("-p,1", "demo"));
  EXPECT_THAT(groups({"run", "-qp1", "demo"}), ElementsAre("-p", "demo"));
  EXPECT_THAT(groups({"run", "-qx", "demo"}), ElementsAre("-x", "demo"));
  EXPECT_THAT(groups({"run", "--port", "-1", "demo"}), ElementsAre("--port,-1", "demo"));
  EXPECT_THAT(groups({"--debug", "run", "--allow-host", "a", "b", "--", "-x"}),
              ElementsAre("--debug", "--allow-host,a,b", "--", "-x"));
  EXPECT_THAT(groups({"run", "--numa-nodes", "0", "demo"}), ElementsAre("--numa-nodes,0", "demo"));
  EXPECT_EQ(told_apart(app, {"quant", "gpu", "-o", "x"}).path, "kt quant gpu");
}

TEST_F(CommandWordsTest, FlagsOfTheOtherServerAreTakenOutWithTheirValues) {
  Words words = {"run", "--mem-fraction-static", "0.9", "demo", "--enable-mixed-chunk", "--port",
                 "1",   "--cuda-graph-bs",       "1",   "2",    "--watchdog-timeout=3"};
  EXPECT_THAT(groups(words), ElementsAre("--mem-fraction-static,0.9", "demo", "--enable-mixed-chunk",
                                         "--port,1", "--cuda-graph-bs,1,2", "--watchdog-timeout"));
  take_out_ignored(app, words);
  EXPECT_THAT(words, ElementsAre("run", "demo", "--port", "1"));
  EXPECT_THAT(refused({"run", "demo", "--watchdog-timeout"}),
              HasSubstr("--watchdog-timeout: expected a value"));
  EXPECT_THAT(refused({"run", "demo", "--enable-mixed-chunk=1"}), HasSubstr("takes no value"));
}

TEST_F(CommandWordsTest, AFlagInNoTableIsAnErrorBeforeItsValueIsAModel) {
  EXPECT_EQ(refused({"run", "--prot", "8080"}),
            "unknown flag '--prot'; the nearest known one is --port; see kt run --help");
  EXPECT_THAT(refused({"run", "--mem-fraction-statc", "1"}), HasSubstr("one is --mem-fraction-static;"));
  EXPECT_EQ(refused({"run", "-x", "demo"}), "unknown flag '-x'; see kt run --help");
  // Flags of a server are known to `kt run` alone.
  EXPECT_THAT(refused({"quant", "gpu", "--mem-fraction-static", "0.9"}), HasSubstr("kt quant gpu --help"));
  EXPECT_EQ(refused({"run", "--", "--prot"}), "");
  EXPECT_EQ(refused({"run", "-1"}), "");          // a number, whatever it is for
  EXPECT_EQ(refused({"no-verb", "--prot"}), "");  // the word before it is what is wrong
}

TEST_F(CommandWordsTest, OtherSpellings) {
  EXPECT_THAT(respelt(app, {"microbench", "-n", "3"}), ElementsAre("microbench", "moe", "-n", "3"));
  EXPECT_THAT(respelt(app, {"microbench"}), ElementsAre("microbench", "moe"));
  EXPECT_THAT(respelt(app, {"microbench", "mla", "-n", "3"}), ElementsAre("microbench", "mla", "-n", "3"));
  EXPECT_THAT(respelt(app, {"microbench", "-n", "3", "mla"}), ElementsAre("microbench", "mla", "-n", "3"));
  // What is wrong is said of moe where it is the value of a flag, else of the component.
  EXPECT_THAT(respelt(app, {"microbench", "--of", "3"}), ElementsAre("microbench", "moe", "--of", "3"));
  EXPECT_THAT(respelt(app, {"microbench", "-n", "3", "x"}), ElementsAre("microbench", "-n", "3", "x"));
  EXPECT_THAT(respelt(app, {"microbench", "--help"}), ElementsAre("microbench", "--help"));
  EXPECT_THAT(respelt(app, {"microbench", "nonsense"}), ElementsAre("microbench", "nonsense"));
  EXPECT_THAT(respelt(app, {"bench", "-n", "3", "-t", "moe"}), ElementsAre("microbench", "moe", "-n", "3"));
  EXPECT_THAT(respelt(app, {"bench", "--type=moe"}), ElementsAre("microbench", "moe"));
  EXPECT_THAT(respelt(app, {"bench", "-tmoe"}), ElementsAre("microbench", "moe"));
  // Flags are the kernel's: a value behind one is no model.
  EXPECT_THAT(respelt(app, {"bench", "-t", "moe", "--of", "3"}),
              ElementsAre("microbench", "moe", "--of", "3"));
  EXPECT_THROW(respelt(app, {"bench", "-t", "moe", "-m", "demo"}), Error);
  EXPECT_THROW(respelt(app, {"bench", "demo", "-t", "moe"}), Error);
  EXPECT_THAT(respelt(app, {"bench", "-t", "inference"}), ElementsAre("bench", "-t", "inference"));
}

TEST(SglangFlags, ValuesAndReasons) {
  EXPECT_EQ(sglang_flag("--mem-fraction-static"), FlagValues::kOne);
  EXPECT_EQ(sglang_flag("--trust-remote-code"), FlagValues::kNone);
  EXPECT_EQ(sglang_flag("--lora-paths"), FlagValues::kMany);
  EXPECT_EQ(sglang_flag("--model-checksum"), FlagValues::kMayBeOne);
  for (const char* const none : {"--", "--mem", "--mem-fraction-static=", "mem-fraction-static", "--=", ""})
    EXPECT_FALSE(sglang_flag(none)) << none;
  EXPECT_NE(reason_to_ignore("--gpu-experts"), "");
  EXPECT_EQ(reason_to_ignore("--watchdog-timeout"), "");
}

}  // namespace
}  // namespace kt::inline cli
