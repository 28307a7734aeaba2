// --kt-method: the table of weight methods (weights/weight_method.h) as the command line and its settings see it.
#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <string_view>

namespace kt::inline cli {

// What is wrong with a method's name; empty: nothing.
std::string weight_method_problem(std::string_view name);
// Takes a method's name, short or long and in any case, and leaves the long one.
CLI::Validator weight_method_name();

// The format that the experts under `path` are rounded to as they are loaded with this method; empty: they are loaded
// as they are stored. Error naming the method, how they are stored and the path if that is not what the method says.
std::string checked_method_format(const std::string& method, const std::string& path);

}  // namespace kt::inline cli
