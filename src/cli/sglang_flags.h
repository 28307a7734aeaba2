// Flags of SGLang's server, which people paste behind `kt run`: one table of their names and how many values each
// takes. What a flag of the table means here, if anything, is for the verb to say.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline cli {

enum class FlagValues : uint8_t { kNone, kOne, kMayBeOne, kMany };

// Of "--mem-fraction-static"; nothing if SGLang has no such flag.
std::optional<FlagValues> sglang_flag(std::string_view flag);

std::vector<std::string> sglang_flags();  // all of them, "--mem-fraction-static"

// Why a flag means nothing here: "" where its name says enough.
std::string_view reason_to_ignore(std::string_view flag);

}  // namespace kt::inline cli
