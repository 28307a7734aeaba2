// Command lines of `kt run` under names of their own: runs.yaml in kt's folder. `kt run --save NAME` writes one, and in
// `kt run @NAME` its words stand where the name does.
#pragma once
#include <string>
#include <string_view>

#include "cli/command_words.h"

namespace kt::inline cli {

// `words` are the arguments of kt, and `kt run --save NAME` among them. What belongs to one call alone (--save,
// --dry-run, --json, --download) is left out, and paths are written so that they mean the same elsewhere. Error for a
// key on the command line, which would be kept in a file, and a name that is none.
void save_run(const CLI::App& app, const std::string& name, const Words& words);
void forget_run(const std::string& name);  // Error naming those that there are

// With the saved words in place of "@NAME". Flags that are typed too win over saved ones. Other words come back as they
// are. Error naming those that there are.
Words with_saved_run(const CLI::App& app, const Words& words);

}  // namespace kt::inline cli
