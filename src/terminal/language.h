// What people read, in their language. Code has it in English, fail(tr("no model at {}"), path); a table that is given
// once, when the program starts, has the same patterns in another language. Whatever programs read is not translated.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/text.h"

namespace kt::inline terminal {

struct Translation {
  std::string_view english, other;  // with the same holes in the same order
};

// From now on tr() and tr_now() answer from this table, which must outlive it; without one, in English.
void speak(std::span<const Translation> table);

// The text in the table's language; as it is where the table has none.
std::string tr_now(std::string_view english);

// A pattern for text() and fail(), whose holes are counted in English when the call is compiled.
consteval ExchangedPattern tr(std::string_view english) { return {english, tr_now}; }

// Marks text in a constant that tr_now() is asked for when it is shown.
constexpr const char* tr_later(const char* english) { return english; }

// "1 core", "2 cores" from "{} core" and "{} cores".
std::string tr_counted(int64_t n, std::string_view one, std::string_view many);

}  // namespace kt::inline terminal
