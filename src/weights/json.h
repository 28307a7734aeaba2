// JSON from files nobody vouches for: bounded in size and depth, no duplicate keys, errors that name the
// file.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kt {

using Json = nlohmann::json;

struct JsonLimits {
  size_t bytes = 100u << 20;
  int depth = 64;
  size_t values = 8u << 20;  // numbers, strings, arrays, ...: what bounds the memory of the parsed value
};

// Parses with a handler of nlohmann's SAX interface that stops by throwing Error. The part both readers of
// untrusted JSON share: syntax errors become Error(kInput) "<name>: ... at byte N".
void parse_json_into(nlohmann::json_sax<Json>& handler, std::string_view characters, std::string_view name);
// What the handler's parse_error() does.
[[noreturn]] void json_syntax_error(size_t position, const nlohmann::detail::exception& error,
                                    std::string_view name);

// The value, or Error(kInput) "<name>: ... at byte N". Comments, NaN and trailing text are errors.
Json parse_json(std::string_view characters, std::string_view name, JsonLimits limits = {});
// The same of a whole file; a file that is missing or larger than the limit is an Error naming it.
Json read_json(const std::string& path, JsonLimits limits = {});

}  // namespace kt
