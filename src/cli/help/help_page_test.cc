#include "cli/help/help_page.h"

#include <gmock/gmock.h>

namespace kt::inline cli {
namespace {

using testing::HasSubstr;
using testing::Not;

CommandInfo made_up() {
  CommandInfo out{.name = "run",
                  .path = "kt run",
                  .description = "Serve a model that is described in more words than forty columns hold",
                  .footer =
                      "Some prose that was broken\nby hand where it need not be.\n\nExamples:\n"
                      "  kt run demo --first-flag 1 --second-flag 2        what it does, in a few words"};
  out.options.push_back({.names = {},
                         .positional = true,
                         .positional_name = "MODEL",
                         .value = "TEXT",
                         .description = "The model"});
  out.options.push_back(
      {.names = {"-p", "--port"}, .value = "INT", .description = "Its port", .preset = "30000"});
  out.options.push_back({.names = {"--kind"},
                         .value = "TEXT",
                         .choices = {"a", "b"},
                         .description = "Which",
                         .required = true});
  out.options.push_back({.names = {"--method"},
                         .value = "TEXT",
                         .choices = {"FIRST", "SECOND", "THIRD", "FOURTH", "FIFTH"},
                         .description = "How"});
  return out;
}

TEST(HelpPage, FitsItsWidth) {
  for (const int width : {30, 40, 80, 110}) {
    const std::string page = help_page(made_up(), width);
    for (const std::string& line : CLI::detail::split(page, '\n'))
      EXPECT_LE(line.size(), static_cast<size_t>(width)) << line;
  }
}

TEST(HelpPage, ShowsPlainTypes) {
  const std::string page = help_page(made_up(), 110);
  EXPECT_THAT(page, HasSubstr("Usage: kt run [OPTIONS] [MODEL]\n"));
  EXPECT_THAT(page, HasSubstr("  -p, --port N"));
  EXPECT_THAT(page, HasSubstr("Its port [30000]\n"));
  EXPECT_THAT(page, HasSubstr("  --kind a|b"));
  EXPECT_THAT(page, HasSubstr("Which (required)\n"));
  // A list that is too long for a type stands in the description.
  EXPECT_THAT(page, HasSubstr("  --method NAME"));
  EXPECT_THAT(page, HasSubstr("How; one of FIRST, SECOND, THIRD, FOURTH, FIFTH\n"));
  EXPECT_THAT(page, Not(HasSubstr("INT")));
  EXPECT_THAT(page, HasSubstr("\nSome prose that was broken by hand where it need not be.\n"));
  EXPECT_THAT(
      page, HasSubstr("  kt run demo --first-flag 1 --second-flag 2        what it does, in a few words\n"));
}

TEST(HelpPage, IsReadFromTheParser) {
  CLI::App app("", "kt");
  std::vector<int> tokens = {1, 16};
  app.add_option("--tokens", tokens, "Of a call")->capture_default_str();
  app.add_subcommand("verb");
  EXPECT_THAT(help_page(describe_command(app, "kt"), 110), HasSubstr("Of a call [1,16]\n"));
  EXPECT_THAT(help_page(describe_command(app, "kt"), 110), HasSubstr("Usage: kt [OPTIONS] [VERB]\n"));
  app.require_subcommand(1);
  EXPECT_THAT(help_page(describe_command(app, "kt"), 110), HasSubstr("Usage: kt [OPTIONS] VERB\n"));
}

TEST(HelpPage, ACommandThatIsBrokenIsOneForAShell) {
  EXPECT_THAT(help_page(made_up(), 40),
              HasSubstr("  kt run demo --first-flag 1 \\\n      --second-flag 2\n"));
}

}  // namespace
}  // namespace kt::inline cli
