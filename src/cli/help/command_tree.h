// The command line as a value: every verb and option that CLI11 knows, in the form that completions and the
// man page need. Read from the same App that parses, so that neither can name what does not exist.
#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace kt::inline cli {

enum class Completes { kNothing, kFiles, kFolders };

struct OptionInfo {
  std::vector<std::string> names;    // "-o", "--output"; the positional's own name when it has no flag
  bool positional = false;           // may also be given without a flag
  std::string positional_name;       // "MODEL"; empty for a flag-only option
  std::string value;                 // "TEXT", "INT"; empty for a flag without a value
  std::vector<std::string> choices;  // what the value is checked against; empty: anything
  Completes completes = Completes::kNothing;
  std::string description, preset;  // preset: the default, as text; "1,16" of a list
  bool required = false, repeats = false;
};

struct CommandInfo {
  std::string name;  // "gpu"
  std::string path;  // "kt quant gpu"
  std::string description, footer;
  std::vector<OptionInfo> options;  // flags and positionals in the order of --help; hidden ones are left out
  std::vector<CommandInfo> verbs;
  bool needs_verb = false;  // one of them has to be named
};

// The value of an option for people: "N", "NUMBER", "FOLDER", "TEXT"; its choices "a|b" where they are few, else
// "NAME".
std::string plain_type(const OptionInfo& option);

OptionInfo describe_option(const CLI::Option& option);
// Everything below `app`; `path` is how it is called.
CommandInfo describe_command(const CLI::App& app, const std::string& path);

// The verb that the words name, from `app` down. Error(kInput) naming the known verbs for an unknown word.
const CLI::App& find_verb(const CLI::App& app, const std::vector<std::string>& words);
CLI::App& find_verb(CLI::App& app, const std::vector<std::string>& words);

// This command and all below it, parents first.
std::vector<const CommandInfo*> all_commands(const CommandInfo& top);

// A description cut at its semicolons: "GPTQ: calibrated with text", "RTN: round to nearest".
std::vector<std::string> clauses(const std::string& description);

// Text cut at empty lines; no empty pieces.
std::vector<std::string> paragraphs(const std::string& text);

}  // namespace kt::inline cli
