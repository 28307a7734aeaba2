// Names and reasons that came from a file, made fit for one line of an error.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/json.h"

namespace kt::inline texts {

// printable(), of at most 200 bytes.
std::string shown(std::string_view untrusted);
// "a, b, c": each shown; after `most` of them " and 17 more".
std::string shown_list(std::span<const std::string> names, size_t most = 20);

// The name of `known` with the fewest letters to change, add, remove or swap; "" if `known` is empty. Of `name` the
// first hundred bytes count.
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);

// "expected" and "found" of errors: "text", "an integer", "a list", ...
std::string_view json_kind(const Json& value);

}  // namespace kt::inline texts
