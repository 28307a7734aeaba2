// Strings within a length, a pattern or a format.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "text/grammar/json_rules.h"

namespace kt::inline texts {

// The network of the strings, quotes included, that fit `schema` (minLength, maxLength, pattern, format).
// Error(kInput) that begins with `path`.
StateId string_rule(RuleBuilder& builder, JsonRules& json, const nlohmann::ordered_json& schema,
                    const std::string& path);
// The same strings as they are, neither quoted nor escaped.
StateId bare_string_rule(RuleBuilder& builder, const BareText& text, const nlohmann::ordered_json& schema,
                         const std::string& path);
// Whether a text has the length, pattern and format that `schema` asks for.
bool string_fits(const std::string& text, const nlohmann::ordered_json& schema, const std::string& path);

// A length or count of a schema; `missing` where it is not there. Error(kInput) if it is no whole number of
// at least 0, or above 10^9.
int64_t count_of(const nlohmann::ordered_json& schema, const char* keyword, int64_t missing,
                 const std::string& path);

}  // namespace kt::inline texts
