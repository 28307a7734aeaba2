// The value of --format: names of weight formats, or all.
#pragma once
#include <string>
#include <vector>

#include "base/function_ref.h"
#include "formats/known_formats.h"

namespace kt::inline cli {

// The formats of those names, under the names given. `all` stands for every one that `check` does not throw
// for; the others are named on standard error.
std::vector<NamedFormat> listed_formats(const std::vector<std::string>& names,
                                        FunctionRef<void(const Format&)> check);

}  // namespace kt::inline cli
