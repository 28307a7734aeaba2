// JSON from files nobody vouches for: bounded in size and depth, no duplicate keys, errors that name the
// file.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kt::inline texts {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;  // objects keep the order of their keys

struct JsonLimits {
  size_t bytes = 100u << 20;
  int depth = 64;
  size_t values = 8u << 20;  // numbers, strings, arrays, ...: what bounds the memory of the parsed value
  size_t keys = 8u << 20;    // of one object
};

// Parses with a handler of nlohmann's SAX interface that stops by throwing Error. The part both readers of
// untrusted JSON share: syntax errors become Error(kInput) "<name>: ... at byte N".
void parse_json_into(nlohmann::json_sax<Json>& handler, std::string_view characters, std::string_view name);
// What the handler's parse_error() does.
[[noreturn]] void json_syntax_error(size_t position, const nlohmann::detail::exception& error,
                                    std::string_view name);

// The value, or Error(kInput) "<name>: ... at byte N". Comments, NaN and trailing text are errors.
Json parse_json(std::string_view characters, std::string_view name, JsonLimits limits = {});
// The same with the order of keys kept. Objects are searched key by key, so one has at most kOrderedKeys.
inline constexpr size_t kOrderedKeys = 1024;
OrderedJson parse_ordered_json(std::string_view characters, std::string_view name, JsonLimits limits = {});
// The same of a whole file; a file that is missing or larger than the limit is an Error naming it.
Json read_json(const std::string& path, JsonLimits limits = {});

}  // namespace kt::inline texts
