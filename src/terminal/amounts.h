// Sizes as people type them, times as they read them.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace kt::inline terminal {

// "8GiB", "40 GB", "512M", "1000": bytes. Error that begins with `name` otherwise.
uint64_t parse_bytes(std::string_view value, std::string_view name);

// "3m12s", "1h05m", "41s".
std::string duration(double seconds);

}  // namespace kt::inline terminal
