// The words of a command line, told apart before they are parsed: flags that nobody knows are found here, so that no
// value behind one is ever taken for a model, and flags of SGLang's server that mean nothing are taken out.
#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace kt::inline cli {

using Words = std::vector<std::string>;

// A flag with the words that it takes, or a word alone.
struct WordGroup {
  size_t begin = 0, end = 0;            // of the words
  std::string flag;                     // "--port" as it was typed, without "=8080"; "" for a word alone
  const CLI::Option* option = nullptr;  // of the verb, or of what is above it; null: none, or a word alone
  bool foreign = false;                 // of SGLang's table and no option here
};

struct CommandWords {
  const CLI::App* verb = nullptr;  // the one that was named; the program where none was
  std::string path;                // "kt run"
  std::vector<WordGroup> groups;   // behind the verb's own words, in order
};

// `words` are the arguments of kt; flags of SGLang's server are known to `kt run` alone. Nothing is an error here.
CommandWords told_apart(const CLI::App& app, const Words& words);

// Other spellings of a command: `kt microbench` without a component means moe, with flags before it the same as behind
// it; and `kt bench --type moe` is `kt microbench moe`. Error(kInput) for a model with such a type.
Words respelt(const CLI::App& app, Words words);

// Takes the flags out of `words` that are accepted and mean nothing, with their values. Error(kInput) for a flag that
// is in no table, with the nearest one that is.
void take_out_ignored(const CLI::App& app, Words& words);

}  // namespace kt::inline cli
