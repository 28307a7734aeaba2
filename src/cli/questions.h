// The interactive mode: a verb called without arguments on a terminal asks for them. One table says which options each
// verb asks for; words, choices, defaults and checks are the options' own. The answers become the arguments that could
// have been typed, which are shown and then run like any others. With arguments, or without a terminal, nothing is
// asked.
#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "terminal/prompts.h"

namespace kt::inline cli {

// Whether standard input and standard error are a terminal.
bool can_ask();

// `words` are the arguments of kt, such as {"quant"}; `app` has its verbs. If the words are exactly a verb of the
// table, they come back with the answers behind them; else as they are. Throws PromptEnded.
std::vector<std::string> with_answers(CLI::App& app, const std::vector<std::string>& words, Prompts& prompts);

// What these questions may show of options, verbs and settings, in English: all that a translation must have.
std::vector<std::string> asked_phrases(CLI::App& app);

// "kt quant './a model' -o out", as a shell takes it.
std::string command_line(const std::vector<std::string>& words);

}  // namespace kt::inline cli
