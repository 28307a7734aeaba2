// Flags that kt run accepts and that mean nothing to it: which were typed, and what is said of them.
#pragma once
#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "cli/command_words.h"

namespace kt::inline cli {

struct IgnoredFlag {
  std::string flag;
  Words values;
};

// Those that were typed, as they were typed: of SGLang's table, and options of ours that mean nothing now.
std::vector<IgnoredFlag> ignored_flags(const CLI::App& kt, const Words& words,
                                       const std::vector<const CLI::Option*>& accepted);
std::string ignored_names(const std::vector<IgnoredFlag>& ignored);  // "--tp, --advanced"
// All of them in one line, then why, where that is not plain.
void print_ignored(const std::vector<IgnoredFlag>& ignored, std::FILE* out);

}  // namespace kt::inline cli
