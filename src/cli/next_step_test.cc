#include "cli/next_step.h"

#include <gmock/gmock.h>

#include "cli/verbs.h"

namespace kt::inline cli {
namespace {

// The command after these words, with a made-up verb that has what rows ask for.
NextStep after(const std::vector<std::string>& words) {
  CLI::App app;
  std::string text[8];
  bool json = false, dry = false;
  for (const char* const name : {"estimate", "run", "bench", "generate"}) {
    CLI::App* const verb = app.add_subcommand(name);
    verb->add_option("MODEL", text[0]);
    verb->add_option("--model-path,--model", text[1]);
    verb->add_option("--weights,--kt-weight-path", text[2]);
    verb->add_option("--format", text[3]);
    verb->add_option("--server", text[4]);
    verb->add_flag("--json", json);
    verb->add_flag("--dry-run", dry);
  }
  CLI::App* const quant = app.add_subcommand("quant");
  quant->add_option("-o,--output", text[5]);
  quant->add_option("--resume-layer", text[6]);
  CLI::App* const merge = quant->add_subcommand("merge");
  merge->add_option("-o,--output", text[5]);
  merge->add_option("-r,--original-path", text[7]);
  app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  return next_step(app, words);
}

TEST(NextStep, HasTheValuesThatWereGiven) {
  EXPECT_EQ(after({"quant", "-o", "./out"}).command, "kt run ./out");
  EXPECT_EQ(after({"quant", "-o", "an out"}).command, "kt run 'an out'");
  EXPECT_EQ(after({"quant", "-o", "./out"}).line, NextLine::kReport);
  EXPECT_EQ(after({"estimate", "./m", "--kt-weight-path", "./w", "--format", "int8"}).command,
            "kt run ./m --weights ./w --format int8");
  EXPECT_EQ(after({"bench", "--server", "http://h"}).command, "kt chat --url http://h");
}

TEST(NextStep, TakesTheRowThatFits) {
  EXPECT_EQ(after({"quant", "-o", "./out", "--resume-layer", "3"}).command, "");
  EXPECT_EQ(after({"quant", "merge", "-o", "./out", "-r", "./m"}).command, "kt run ./out");
  EXPECT_EQ(after({"quant", "merge", "-o", "./out"}).command, "kt model verify ./out");
  EXPECT_EQ(after({"run", "--model", "./m", "--dry-run"}).command, "kt run --model ./m");
  EXPECT_EQ(after({"run", "./m"}).command, "");  // said when it was ready
}

TEST(NextStep, StaysOutOfWhatProgramsRead) {
  EXPECT_EQ(after({"estimate", "./m", "--json"}).line, NextLine::kNone);
  EXPECT_EQ(after({"generate", "./m"}).line, NextLine::kTerminal);
}

void add_every_verb(CLI::App& app, Invocation& run) {
  for (const auto add :
       {add_version, add_doctor, add_microbench, add_run, add_estimate, add_generate, add_chat,
        add_perplexity, add_sft, add_bench, add_quant, add_model, add_config, add_help, add_completion})
    add(app, run);
}

std::vector<CLI::App*> all(CLI::App* verb) {
  return verb->get_subcommands([](CLI::App*) { return true; });
}

// CLI11 from 2.4 on takes --n and -n for one name and ends the program where both are added; earlier ones do not.
void expect_no_long_name_of_one_letter(CLI::App* verb) {
  for (const CLI::Option* option : verb->get_options())
    for (const std::string& name : option->get_lnames())
      EXPECT_GT(name.size(), 1u) << verb->get_name() << " --" << name;
  for (CLI::App* below : all(verb)) expect_no_long_name_of_one_letter(below);
}

TEST(Verbs, NoLongNameHasOneLetter) {
  CLI::App app;
  Invocation run;
  add_every_verb(app, run);
  expect_no_long_name_of_one_letter(&app);
}

// A verb that is added needs a row, or a reason.
TEST(NextStep, EveryVerbHasOne) {
  CLI::App app;
  Invocation run;
  add_every_verb(app, run);
  for (CLI::App* verb : all(&app)) {
    const bool acts = verb->get_name() == "quant" || all(verb).empty();
    if (acts) {
      EXPECT_TRUE(has_next_step(verb->get_name())) << verb->get_name();
    }
    for (CLI::App* below : all(verb))
      EXPECT_TRUE(has_next_step(verb->get_name() + " " + below->get_name()))
          << verb->get_name() << " " << below->get_name();
  }
}

}  // namespace
}  // namespace kt::inline cli
