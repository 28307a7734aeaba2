// Numbers within bounds, digit by digit.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "text/grammar/json_rules.h"

namespace kt::inline texts {

// The network of the numbers that fit `schema` (minimum, maximum, exclusiveMinimum, exclusiveMaximum,
// multipleOf); whole ones only if `whole`. Bounds are exact, as decimals; numbers with bounds have no
// exponent. Error(kInput) that begins with `path`.
StateId number_rule(RuleBuilder& builder, JsonRules& json, const nlohmann::ordered_json& schema, bool whole,
                    const std::string& path);

}  // namespace kt::inline texts
