// kt completion: prints a shell's completion script; and what the scripts of the three shells share.
#include "cli/help/completion.h"

#include <algorithm>
#include <cstdio>

#include "cli/verbs.h"

namespace kt::inline cli {

std::string shell_quoted(const std::string& word) {
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::vector<OptionInfo> options_of(const CommandInfo& command, const CommandInfo& kt) {
  std::vector<OptionInfo> all = command.options;
  if (&command == &kt) return all;
  for (const OptionInfo& option : kt.options) {
    const bool known =
        std::any_of(all.begin(), all.end(), [&](const OptionInfo& own) { return own.names == option.names; });
    if (!known) all.push_back(option);
  }
  return all;
}

bool lists_models(const CommandInfo& kt) {
  for (const CommandInfo* command : all_commands(kt)) {
    if (command->path != "kt model list") continue;
    for (const OptionInfo& option : command->options)
      if (std::find(option.names.begin(), option.names.end(), "--names") != option.names.end()) return true;
  }
  return false;
}

bool names_model(const OptionInfo& option) { return option.positional && option.positional_name == "MODEL"; }

void add_completion(CLI::App& kt, Invocation& run) {
  CLI::App* verb = kt.add_subcommand("completion", "Print the completion script of a shell");
  const auto shell = std::make_shared<std::string>();
  verb->add_option("SHELL", *shell, "The shell: bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  verb->footer(
      "Examples:\n"
      "  source <(kt completion bash)                                          in this bash\n"
      "  kt completion bash > ~/.local/share/bash-completion/completions/kt    in every bash\n"
      "  kt completion zsh > ~/.zfunc/_kt                                      a folder of zsh's fpath\n"
      "  kt completion fish > ~/.config/fish/completions/kt.fish\n\n"
      "make install and the Debian package put all three in place.");
  verb->callback([&kt, &run, shell] {
    run.action = [&kt, shell] {
      const CommandInfo tree = describe_command(kt, kt.get_name());
      const std::string script = *shell == "bash"  ? bash_completion(tree)
                                 : *shell == "zsh" ? zsh_completion(tree)
                                                   : fish_completion(tree);
      std::fputs(script.c_str(), stdout);
    };
  });
}

}  // namespace kt::inline cli
