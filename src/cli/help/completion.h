// Shell completions as text, made from the command tree: verbs, options, checked values, files and folders.
#pragma once
#include <string>

#include "cli/help/command_tree.h"

namespace kt::inline cli {

std::string bash_completion(const CommandInfo& kt);
std::string zsh_completion(const CommandInfo& kt);
std::string fish_completion(const CommandInfo& kt);

// A word as all three shells read it between single quotes, quotes included.
std::string shell_quoted(const std::string& word);
// The options that `command` takes after its name: its own and the program's.
std::vector<OptionInfo> options_of(const CommandInfo& command, const CommandInfo& kt);
// True where the tree has a verb that lists the names of known models, one to a line: `kt model list
// --names`.
bool lists_models(const CommandInfo& kt);
// True for a value that is a model: a path, or a name that `kt model list --names` knows.
bool names_model(const OptionInfo& option);

}  // namespace kt::inline cli
