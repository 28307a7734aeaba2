#include "text/grammar/schema_merge.h"

#include <algorithm>
#include <array>
#include <set>

#include "base/error.h"
#include "base/utf8.h"

namespace kt::inline texts {
namespace {

constexpr std::array kUnderstood = {"$ref",
                                    "allOf",
                                    "anyOf",
                                    "oneOf",
                                    "type",
                                    "enum",
                                    "const",
                                    "properties",
                                    "required",
                                    "additionalProperties",
                                    "items",
                                    "prefixItems",
                                    "minItems",
                                    "maxItems",
                                    "minLength",
                                    "maxLength",
                                    "pattern",
                                    "format",
                                    "minimum",
                                    "maximum",
                                    "exclusiveMinimum",
                                    "exclusiveMaximum",
                                    "multipleOf",
                                    "minProperties",
                                    "maxProperties",
                                    "uniqueItems"};

constexpr std::array kNotUnderstood = {"not",
                                       "if",
                                       "dependentRequired",
                                       "dependentSchemas",
                                       "dependencies",
                                       "patternProperties",
                                       "propertyNames",
                                       "unevaluatedProperties",
                                       "unevaluatedItems",
                                       "contains",
                                       "additionalItems",
                                       "$dynamicRef",
                                       "$recursiveRef"};

struct KeywordType {
  std::string_view keyword, type;
};
constexpr KeywordType kKeywordTypes[] = {
    {"properties", "object"},    {"required", "object"},         {"additionalProperties", "object"},
    {"minProperties", "object"}, {"maxProperties", "object"},    {"items", "array"},
    {"prefixItems", "array"},    {"minItems", "array"},          {"maxItems", "array"},
    {"uniqueItems", "array"},    {"minLength", "string"},        {"maxLength", "string"},
    {"pattern", "string"},       {"format", "string"},           {"minimum", "number"},
    {"maximum", "number"},       {"exclusiveMinimum", "number"}, {"exclusiveMaximum", "number"},
    {"multipleOf", "number"}};

constexpr std::array<std::string_view, 6> kTypes = {"object", "array", "string", "number", "boolean", "null"};

template <typename List>
bool in(const List& list, std::string_view word) {
  return std::ranges::find(list, word) != list.end();
}

std::string decoded(std::string_view part) {
  std::string percent;
  const auto hex = [](char c) { return c <= '9' ? c - '0' : (c | 32) - 'a' + 10; };
  const auto is_hex = [](char c) { return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'f'); };
  for (size_t i = 0; i < part.size(); ++i) {
    const bool coded = part[i] == '%' && i + 2 < part.size() && is_hex(part[i + 1]) && is_hex(part[i + 2]);
    percent += coded ? static_cast<char>(hex(part[i + 1]) * 16 + hex(part[i + 2])) : part[i];
    if (coded) i += 2;
  }
  std::string out;
  for (size_t i = 0; i < percent.size(); ++i) {
    const bool coded = percent[i] == '~' && i + 1 < percent.size();
    out += coded ? (percent[++i] == '1' ? '/' : '~') : percent[i];
  }
  return out;
}

std::set<std::string> names_of_types(const Schema& schema, const std::string& path) {
  const std::vector<std::string> types = types_of(schema, path);
  return {types.begin(), types.end()};
}

// The values that `enum` and `const` leave; null: neither is there.
Schema constants_of(const Schema& schema) {
  if (!schema.is_object()) return nullptr;
  if (schema.contains("const")) return Schema::array({schema.at("const")});
  if (schema.contains("enum") && schema.at("enum").is_array()) return schema.at("enum");
  return nullptr;
}

// Types that we write for a schema, and those that are valid against it: without "type", keywords speak of
// their own types only and let all others through, which we do not write.
std::set<std::string> types_that_come(const Schema& schema) {
  const Schema constants = constants_of(schema);
  if (constants.is_null()) return names_of_types(schema, "json_schema");
  std::set<std::string> types;
  for (const Schema& value : constants)
    types.insert(value.is_number_integer() ? "integer" : value.type_name());  // "number" for others
  return types;
}

std::set<std::string> types_that_are_valid(const Schema& schema) {
  if (schema.contains("type") || !constants_of(schema).is_null()) return types_that_come(schema);
  return {kTypes.begin(), kTypes.end()};
}

Schema both(const Schema& a, const Schema& b) { return Schema{{"allOf", Schema::array({a, b})}}; }

// What one schema says of a property that the other names.
Schema of_property(const Schema& schema, const std::string& name) {
  if (schema.contains("properties") && schema.at("properties").contains(name))
    return schema.at("properties").at(name);
  return schema.value("additionalProperties", Schema(true));
}

void merge_properties(const Schema& a, const Schema& b, Schema& out, const std::string& path) {
  Schema properties = Schema::object();
  for (const Schema* side : {&a, &b}) {
    if (!side->contains("properties")) continue;
    if (!side->at("properties").is_object()) fail("{}.properties: expected an object", path);
    for (const auto& [name, unused] : side->at("properties").items()) {
      if (properties.contains(name)) continue;
      const Schema left = of_property(a, name), right = of_property(b, name);
      properties[name] = left == true ? right : right == true ? left : both(left, right);
    }
  }
  if (!properties.empty()) out["properties"] = std::move(properties);
  const Schema left = a.value("additionalProperties", Schema(true));
  const Schema right = b.value("additionalProperties", Schema(true));
  if (left == false || right == false)
    out["additionalProperties"] = false;
  else if (left != true || right != true)
    out["additionalProperties"] = left == true ? right : right == true ? left : both(left, right);
}

// The stricter of two limits.
void merge_limit(const char* keyword, const Schema& a, const Schema& b, Schema& out,
                 const std::string& path) {
  const Schema &left = a.at(keyword), &right = b.at(keyword);
  if (!left.is_number() || !right.is_number()) fail("{}.{}: expected a number", path, keyword);
  const bool least =
      std::string_view(keyword).starts_with("min") || std::string_view(keyword) == "exclusiveMinimum";
  out[keyword] = (left < right) == least ? right : left;
}

}  // namespace

bool constrains(std::string_view keyword) { return in(kUnderstood, keyword); }

void check_keywords(const Schema& schema, const std::string& path) {
  for (const auto& [keyword, value] : schema.items()) {
    if (in(kNotUnderstood, keyword)) fail("{}.{}: this keyword is not supported", path, keyword);
    if (keyword == "uniqueItems" && value != false) fail("{}.uniqueItems: only false is supported", path);
  }
}

bool constrains_beyond(const Schema& schema, std::initializer_list<std::string_view> keywords) {
  for (const auto& [keyword, unused] : schema.items())
    if (constrains(keyword) && !in(keywords, keyword)) return true;
  return false;
}

Schema constraints_without(const Schema& schema, std::initializer_list<std::string_view> keywords) {
  Schema out = Schema::object();
  for (const auto& [keyword, value] : schema.items())
    if (constrains(keyword) && !in(keywords, keyword)) out[keyword] = value;
  return out;
}

const Schema& resolved(const Schema& root, const std::string& reference, const std::string& path) {
  const std::string_view text = reference;
  if (text != "#" && !text.starts_with("#/"))
    fail("{}.$ref: expected \"#/...\", a part of this schema, got \"{}\"", path, printable(reference));
  const Schema* at = &root;
  for (size_t begin = 2; begin <= text.size();) {
    const size_t end = std::min(text.find('/', begin), text.size());
    const std::string part = decoded(text.substr(begin, end - begin));
    const Schema* next = nullptr;
    if (at->is_object() && at->contains(part)) next = &at->at(part);
    if (at->is_array() && !part.empty() && part.size() < 8 &&
        part.find_first_not_of("0123456789") == part.npos && std::stoul(part) < at->size())
      next = &at->at(std::stoul(part));
    if (!next) fail("{}.$ref: the schema has no \"{}\"", path, printable(reference));
    at = next;
    begin = end + 1;
  }
  return *at;
}

std::vector<std::string> types_of(const Schema& schema, const std::string& path) {
  std::set<std::string> types;
  if (schema.contains("type")) {
    const Schema& named = schema.at("type");
    for (const Schema& type : named.is_array() ? named : Schema::array({named})) {
      const std::string name = type.is_string() ? type.get<std::string>() : "";
      if (!in(kTypes, name) && name != "integer")
        fail("{}.type: expected a type's name or a list of them", path);
      types.insert(name);
    }
    if (types.empty()) fail("{}.type: expected at least one type", path);
  } else {
    for (const auto& [keyword, about] : kKeywordTypes)
      if (schema.contains(keyword)) types.emplace(about);
    if (types.empty()) types.insert(kTypes.begin(), kTypes.end());
  }
  if (types.contains("number")) types.erase("integer");
  return {types.begin(), types.end()};
}

Schema merged(const Schema& a, const Schema& b, const std::string& path) {
  if (a == true || b == true) return a == true ? b : a;
  if (a == false || b == false) return false;
  Schema out = constraints_without(a, {"properties", "additionalProperties"});
  const Schema added = constraints_without(b, {"properties", "additionalProperties"});
  for (const auto& [keyword, value] : added.items()) {
    if (!out.contains(keyword)) {
      out[keyword] = value;
      continue;
    }
    if (out.at(keyword) == value) continue;
    if (keyword == "required") {
      if (!value.is_array() || !out.at(keyword).is_array())
        fail("{}.required: expected a list of names", path);
      for (const Schema& name : value)
        if (std::ranges::find(out.at(keyword), name) == out.at(keyword).end())
          out.at(keyword).push_back(name);
    } else if (keyword == "items") {
      out[keyword] = both(out.at(keyword), value);
    } else if (keyword.starts_with("min") || keyword.starts_with("max") || keyword.starts_with("exclusive")) {
      merge_limit(keyword.c_str(), a, b, out, path);
    } else if (keyword != "type" && keyword != "enum" && keyword != "const") {
      fail("{}.{}: two that differ must both hold; that is not supported", path, keyword);
    }
  }
  merge_properties(a, b, out, path);
  if (a.contains("type") && b.contains("type")) {
    Schema types = Schema::array();
    const std::set<std::string> left = names_of_types(a, path), right = names_of_types(b, path);
    for (const std::string& type : left)
      if (right.contains(type) || (type == "integer" && right.contains("number"))) types.push_back(type);
    if (left.contains("number") && right.contains("integer")) types.push_back("integer");
    if (types.empty()) return false;
    out["type"] = std::move(types);
  }
  const Schema left = constants_of(a), right = constants_of(b);
  if (!left.is_null() && !right.is_null()) {
    Schema values = Schema::array();
    for (const Schema& value : left)
      if (std::ranges::find(right, value) != right.end()) values.push_back(value);
    if (values.empty()) return false;
    out.erase("const");
    out["enum"] = std::move(values);
  }
  return out;
}

bool disjoint(const Schema& a, const Schema& b) {
  if (a == false || b == false) return true;
  if (!a.is_object() || !b.is_object()) return false;
  const Schema left = constants_of(a), right = constants_of(b);
  if (!left.is_null() && !right.is_null())
    return std::ranges::none_of(left,
                                [&](const Schema& v) { return std::ranges::find(right, v) != right.end(); });
  bool objects = false, others = false;
  for (const auto& [one, other] : {std::pair(&a, &b), std::pair(&b, &a)})
    for (const std::string& type : types_that_come(*one))
      for (const std::string& allowed : types_that_are_valid(*other)) {
        const bool numbers =
            (type == "integer" && allowed == "number") || (type == "number" && allowed == "integer");
        objects |= type == allowed && type == "object";
        others |= numbers || (type == allowed && type != "object");
      }
  if (others) return false;
  if (!objects) return true;
  // A key that one requires and the other does not allow, or allows only with other values.
  for (const auto& [one, other] : {std::pair(&a, &b), std::pair(&b, &a)})
    for (const Schema& name : one->value("required", Schema::array())) {
      if (!name.is_string()) continue;
      const Schema mine = of_property(*one, name), theirs = of_property(*other, name);
      const Schema required = other->value("required", Schema::array());
      if (theirs == false) return true;
      if (std::ranges::find(required, name) != required.end() && disjoint(mine, theirs)) return true;
    }
  return false;
}

}  // namespace kt::inline texts
