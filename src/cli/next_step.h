// The command that comes after a verb, named in its last line: one table for all verbs. Nothing is added to what
// programs read: JSON, lists of names, a completion in a pipe.
#pragma once
#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline cli {

// Whether the line may stand among what the verb prints, or beside it on a terminal only.
enum class NextLine { kNone, kReport, kTerminal };

struct NextStep {
  NextLine line = NextLine::kNone;
  std::string command;  // "kt run ./out"
};

// Of the verb that `app` has parsed from `typed`. A model stands in it as it was typed.
NextStep next_step(const CLI::App& app, const std::vector<std::string>& typed);

// Whether the table has a row of this verb, "model add"; or it needs none.
bool has_next_step(std::string_view verb);

// "next: kt run ./out" on standard output, or on standard error where that and standard output are a terminal.
void print_next(const NextStep& step);

}  // namespace kt::inline cli
