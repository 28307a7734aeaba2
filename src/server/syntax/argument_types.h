// The JSON types that the arguments of tools may have, as their schemas say: what turns the bare text of a value into
// JSON. Lenient where a grammar refuses: what a schema says that is not understood means any type.
#pragma once
#include <map>
#include <string>
#include <string_view>

#include "server/chat_prompt.h"

namespace kt::inline server {

class TypeSet {
 public:
  enum Type : unsigned {
    kString = 1,
    kInteger = 2,
    kNumber = 4,
    kBoolean = 8,
    kNull = 16,
    kObject = 32,
    kArray = 64
  };
  static constexpr unsigned kAll = 127;

  TypeSet() = default;  // any
  explicit constexpr TypeSet(unsigned types) : types_(types) {}
  bool has(Type type) const { return (types_ & type) != 0; }
  bool any() const { return types_ == kAll; }
  bool only_string() const { return types_ == kString; }
  unsigned bits() const { return types_; }
  bool operator==(const TypeSet&) const = default;

 private:
  unsigned types_ = kAll;
};

// Of a schema that stands in `root`, where its references lead. `type` by name or as a list, enum and const by their
// values, nullable; anyOf and oneOf unite, allOf and keywords beside each other intersect, references are followed. A
// schema that says nothing of these, or something that cannot be, means any type.
TypeSet types_of_schema(const OrderedJson& schema, const OrderedJson& root);

// JSON of a value that was written without quotes, by what its schema allows:
// - a string only: the text as it is, whatever it looks like;
// - any type: JSON if the text is JSON, else a string;
// - others: JSON of an allowed type, else a string; True, False and None mean true, false and null.
// Where no string is allowed, JSON of any type is taken, as there is nothing better to make of it. Control characters
// within strings of JSON come out escaped.
std::string json_of_bare(std::string_view text, TypeSet types);
// Characters that a bare string must not begin with, or it might be read as another of the types.
std::string ambiguous_beginnings(TypeSet types);

class ArgumentTypes {
 public:
  // `tools` as template_tools gives them.
  explicit ArgumentTypes(const OrderedJson& tools);
  // Any type for what no schema names.
  TypeSet of(std::string_view function, std::string_view argument) const;

 private:
  struct Function {
    std::map<std::string, TypeSet, std::less<>> arguments;
    TypeSet others;  // additionalProperties
  };
  std::map<std::string, Function, std::less<>> functions_;
};

}  // namespace kt::inline server
