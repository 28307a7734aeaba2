// What people read, in their language. Code has it in English, fail(tr("no model at {}"), path); a table that is given
// once, when the program starts, has the same patterns in another language. Whatever programs read is not translated.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace kt::inline terminal {

struct Translation {
  std::string_view english, other;  // with the same holes in the same order
};

// From now on tr() answers from this table, which must outlive it; without one, in English.
void speak(std::span<const Translation> table);

// The pattern in the table's language; as it is where the table has none.
std::string tr(std::string_view english);

// Marks words in a constant that tr() is asked for when they are shown.
constexpr const char* tr_later(const char* english) { return english; }

// "1 core", "2 cores" from "{} core" and "{} cores".
std::string tr_counted(int64_t n, std::string_view one, std::string_view many);

}  // namespace kt::inline terminal
