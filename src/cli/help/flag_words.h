// Errors of lower floors name options by the words that every caller has, `max_memory`; users of kt type --max-memory.
#pragma once
#include <CLI/CLI.hpp>
#include <string>

namespace kt::inline cli {

// `message` with each word in backticks that is an option of the verb that was parsed, or of one above it, as its flag.
std::string with_flags(const std::string& message, const CLI::App& app);

}  // namespace kt::inline cli
