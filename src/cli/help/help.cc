// kt help: what --help prints, for a verb named as an argument; and the whole program as a man page.
#include <cstdio>

#include "base/error.h"
#include "cli/help/command_tree.h"
#include "cli/help/man_page.h"
#include "cli/verbs.h"
#include "terminal/language.h"

namespace kt::inline cli {
namespace {

struct HelpFlags {
  std::vector<std::string> verbs;
  bool man = false;
};

void print_help(const CLI::App& kt, const HelpFlags& flags) {
  if (flags.man) {
    if (!flags.verbs.empty()) fail(tr("the man page is one for all verbs: kt help --man"));
    std::fputs(man_page(describe_command(kt, kt.get_name()), version()).c_str(), stdout);
    return;
  }
  std::string path = kt.get_name();
  for (const std::string& word : flags.verbs) path += " " + word;
  const CLI::App& verb = find_verb(kt, flags.verbs);
  // Not verb.help(): that follows what was parsed, and parsed was "help".
  std::fputs(verb.get_formatter()->make_help(&verb, path, CLI::AppFormatMode::Normal).c_str(), stdout);
}

}  // namespace

void add_help(CLI::App& kt, Invocation& run) {
  CLI::App* verb = kt.add_subcommand("help", "What a verb does and its options, as --help prints it");
  const auto flags = std::make_shared<HelpFlags>();
  verb->add_option("VERB", flags->verbs, "The verb, and the verb below it; none: the program");
  verb->add_flag("--man", flags->man, "Print the man page of the whole program, as roff");
  verb->footer(
      "Examples:\n"
      "  kt help quant gpu\n"
      "  kt help --man | man -l -");
  verb->callback([&kt, &run, flags] { run.action = [&kt, flags] { print_help(kt, *flags); }; });
}

}  // namespace kt::inline cli
