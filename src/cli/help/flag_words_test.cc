#include "cli/help/flag_words.h"

#include <gtest/gtest.h>

namespace kt::inline cli {
namespace {

TEST(FlagWords, OptionsOfTheVerbBecomeFlags) {
  CLI::App app{"", "kt"};
  CLI::App* const quant = app.add_subcommand("quant");
  CLI::App* const gpu = quant->add_subcommand("gpu");
  std::string memory;
  gpu->add_option("--max-cpu-memory,--max-memory", memory);
  quant->add_flag("--resume");
  app.add_subcommand("run")->add_option("--port", memory);
  app.parse("quant gpu");
  EXPECT_EQ(with_flags("2 are allowed by `max_memory`; `resume` goes on", app),
            "2 are allowed by --max-memory; --resume goes on");
  EXPECT_EQ(with_flags("`kt quant` wrote it, `port` is another verb's", app),
            "`kt quant` wrote it, `port` is another verb's");
  EXPECT_EQ(with_flags("a `b`resume` ` and `resume", app), "a `b--resume ` and `resume");
  EXPECT_EQ(with_flags("``", app), "``");
  EXPECT_EQ(with_flags("", app), "");
}

}  // namespace
}  // namespace kt::inline cli
