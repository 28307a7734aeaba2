// Names and reasons that came from a file, made fit for one line of an error.
#pragma once
#include <span>
#include <string>
#include <string_view>

namespace kt {

// printable(), of at most 200 bytes.
std::string shown(std::string_view untrusted);
// "a, b, c": each shown; after `most` of them " and 17 more".
std::string shown_list(std::span<const std::string> names, size_t most = 20);

}  // namespace kt
