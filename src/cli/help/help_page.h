// The page of --help: a verb's options with plain types, wrapped at the width of whoever reads it.
#pragma once
#include <CLI/CLI.hpp>
#include <string>

#include "cli/help/command_tree.h"

namespace kt::inline cli {

// Columns for help: $COLUMNS, else those of the terminal that is standard output, or standard error where that goes to
// a pager; else a usual one. Never so few that words do not fit.
int help_width();

std::string help_page(const CommandInfo& command, int width);

// For CLI::App::formatter: every --help is a help_page.
std::shared_ptr<CLI::FormatterBase> help_formatter();

}  // namespace kt::inline cli
