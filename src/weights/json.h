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
};

// The value, or Error(kInput) "<name>: ... at byte N". Comments, NaN and trailing text are errors.
Json parse_json(std::string_view characters, std::string_view name, JsonLimits limits = {});
// The same of a whole file; a file that is missing or larger than the limit is an Error naming it.
Json read_json(const std::string& path, JsonLimits limits = {});

}  // namespace kt
