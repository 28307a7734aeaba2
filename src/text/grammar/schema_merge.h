// Schemas as values: which keywords there are, where references lead, and what holds when several do.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline texts {

using Schema = nlohmann::ordered_json;

// Keywords that say what is valid and are understood; all others are annotations or an error.
bool constrains(std::string_view keyword);
// Error(kInput) for keywords that constrain and are not understood.
void check_keywords(const Schema& schema, const std::string& path);
// Whether anything but these keywords constrains.
bool constrains_beyond(const Schema& schema, std::initializer_list<std::string_view> keywords);
// Without these keywords and without annotations.
Schema constraints_without(const Schema& schema, std::initializer_list<std::string_view> keywords);

// "#", "#/$defs/x": the part of `root`. Error(kInput) if it is elsewhere or not there.
const Schema& resolved(const Schema& root, const std::string& reference, const std::string& path);

// The types that a schema allows: those it names, or, where it names none, those its keywords are about; all
// seven if there are no such keywords. "number" takes "integer" in.
std::vector<std::string> types_of(const Schema& schema, const std::string& path);

// What is valid against both; neither has $ref or allOf at the top. Error(kInput) where that is no schema
// that we can write down.
Schema merged(const Schema& a, const Schema& b, const std::string& path);

// Whether nothing can be valid against both, as far as types, constants and closed objects tell.
bool disjoint(const Schema& a, const Schema& b);

}  // namespace kt::inline texts
