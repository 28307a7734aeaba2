#include "server/syntax/argument_types.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "server/syntax/json_scanner.h"
#include "text/grammar/schema_merge.h"

namespace kt::inline server {
namespace {

constexpr int kDeepestSchema = 32;
// What is looked at for one argument and for all of a request, in keys and entries of schemas: what is beyond may have
// any type. References lead to the same schema again and again.
constexpr size_t kMostLooks = 10'000, kMostLooksOfAll = 200'000, kReferenceLooks = 16;

struct TypeName {
  std::string_view name;
  unsigned types;
};
constexpr std::array kTypeNames = {TypeName{"string", TypeSet::kString},
                                   TypeName{"integer", TypeSet::kInteger},
                                   TypeName{"number", TypeSet::kNumber | TypeSet::kInteger},
                                   TypeName{"boolean", TypeSet::kBoolean},
                                   TypeName{"null", TypeSet::kNull},
                                   TypeName{"object", TypeSet::kObject},
                                   TypeName{"array", TypeSet::kArray}};

unsigned type_named(const OrderedJson& name) {
  if (name.is_string())
    for (const TypeName& row : kTypeNames)
      if (row.name == name.get_ref<const std::string&>()) return row.types;
  return TypeSet::kAll;  // not one of JSON Schema's
}

unsigned type_of_value(const OrderedJson& value) {
  if (value.is_string()) return TypeSet::kString;
  if (value.is_number_integer()) return TypeSet::kInteger;
  if (value.is_number()) return TypeSet::kNumber;
  if (value.is_boolean()) return TypeSet::kBoolean;
  if (value.is_object()) return TypeSet::kObject;
  return value.is_array() ? TypeSet::kArray : TypeSet::kNull;
}

class TypeFinder {
 public:
  // Takes what it looks at out of `looks`.
  TypeFinder(const OrderedJson& root, size_t& looks) : root_(root), looks_(looks) {}

  unsigned of(const OrderedJson& schema, int depth) {
    if (!look(1 + schema.size()) || !schema.is_object() || depth > kDeepestSchema) return TypeSet::kAll;
    unsigned out = own(schema);
    if (const auto found = schema.find("$ref");
        found != schema.end() && found->is_string() && look(kReferenceLooks)) {
      try {
        out &= of(resolved(root_, found->get<std::string>(), "$ref"), depth + 1);
      } catch (const Error&) {
        // leads nowhere: says nothing
      }
    }
    for (const char* keyword : {"anyOf", "oneOf"}) {
      const auto found = schema.find(keyword);
      if (found == schema.end() || !found->is_array() || found->empty()) continue;
      unsigned some = 0;
      for (const OrderedJson& choice : *found) {
        some |= of(choice, depth + 1);
        if (looks_ == 0) return TypeSet::kAll;
      }
      out &= some;
    }
    if (const auto found = schema.find("allOf"); found != schema.end() && found->is_array())
      for (const OrderedJson& part : *found) {
        out &= of(part, depth + 1);
        if (looks_ == 0) return TypeSet::kAll;
      }
    if (const auto found = schema.find("nullable"); found != schema.end() && *found == true)
      out |= TypeSet::kNull;
    return out == 0 ? TypeSet::kAll : out;
  }

 private:
  // What type, enum, const and, without a type, the other keywords say.
  unsigned own(const OrderedJson& schema) {
    unsigned out = TypeSet::kAll;
    for (const char* list : {"type", "enum"})
      if (const auto found = schema.find(list); found != schema.end() && !look(found->size())) return out;
    if (const auto found = schema.find("type"); found != schema.end()) {
      unsigned named = found->is_array() ? 0 : type_named(*found);
      if (found->is_array())
        for (const OrderedJson& name : *found) named |= type_named(name);
      out &= named == 0 ? TypeSet::kAll : named;
    } else {
      try {
        unsigned implied = 0;
        for (const std::string& name : types_of(schema, "")) implied |= type_named(name);
        out &= implied;
      } catch (const Error&) {
        // not a schema: says nothing
      }
    }
    const auto values = schema.find("enum"), value = schema.find("const");
    if (value != schema.end()) return out & type_of_value(*value);
    if (values == schema.end() || !values->is_array() || values->empty()) return out;
    unsigned some = 0;
    for (const OrderedJson& one : *values) some |= type_of_value(one);
    return out & some;
  }

  bool look(size_t count) {
    looks_ = count < looks_ ? looks_ - count : 0;
    return looks_ > 0;
  }

  const OrderedJson& root_;
  size_t& looks_;
};

// The text with control characters within strings escaped; empty if it is no JSON then.
std::string as_json(std::string_view text) {
  const size_t first = text.find_first_not_of(" \n\r\t");
  if (first == std::string_view::npos) return {};
  text = text.substr(first, text.find_last_not_of(" \n\r\t") + 1 - first);
  if (!is_json(text)) return {};
  std::string out;
  JsonScanner scanner;
  for (const char c : text) {
    const bool escapes = scanner.in_string() && static_cast<unsigned char>(c) < 0x20;
    scanner.push(c);
    if (!escapes) {
      out += c;
      continue;
    }
    const std::string quoted = nlohmann::json(std::string(1, c)).dump();
    out += quoted.substr(1, quoted.size() - 2);
  }
  return nlohmann::json::accept(out) ? out : std::string();
}

unsigned type_of_text(std::string_view json) {
  switch (json[0]) {
    case '{':
      return TypeSet::kObject;
    case '[':
      return TypeSet::kArray;
    case '"':
      return TypeSet::kString;
    case 't':
    case 'f':
      return TypeSet::kBoolean;
    case 'n':
      return TypeSet::kNull;
    default:
      return json.find_first_of(".eE") == std::string_view::npos ? TypeSet::kInteger : TypeSet::kNumber;
  }
}

std::string quoted_text(std::string_view text) {
  return nlohmann::json(std::string(text)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// As templates that write Python's words have taught some models.
std::string_view python_word(std::string_view text, TypeSet types) {
  if (types.has(TypeSet::kBoolean) && text == "True") return "true";
  if (types.has(TypeSet::kBoolean) && text == "False") return "false";
  if (types.has(TypeSet::kNull) && text == "None") return "null";
  return {};
}

}  // namespace

TypeSet types_of_schema(const OrderedJson& schema, const OrderedJson& root) {
  size_t looks = kMostLooks;
  return TypeSet(TypeFinder(root, looks).of(schema, 0));
}

std::string json_of_bare(std::string_view text, TypeSet types) {
  if (types.only_string()) return quoted_text(text);
  std::string json = as_json(text);
  if (types.any()) return json.empty() ? quoted_text(text) : json;
  if (!json.empty() && !types.has(TypeSet::kString)) return json;
  if (!json.empty() && (type_of_text(json) & types.bits() & ~unsigned{TypeSet::kString}) != 0) return json;
  if (const std::string_view word = python_word(text, types); !word.empty()) return std::string(word);
  return quoted_text(text);
}

std::string ambiguous_beginnings(TypeSet types) {
  std::string out = " \n\r\t";
  if (types.has(TypeSet::kObject)) out += '{';
  if (types.has(TypeSet::kArray)) out += '[';
  if (types.has(TypeSet::kInteger) || types.has(TypeSet::kNumber)) out += "-0123456789";
  if (types.has(TypeSet::kBoolean)) out += "tfTF";
  if (types.has(TypeSet::kNull)) out += "nN";
  return out;
}

ArgumentTypes::ArgumentTypes(const OrderedJson& tools) {
  size_t left = kMostLooksOfAll;
  const auto types = [&](const OrderedJson& schema, const OrderedJson& root) {
    const size_t most = std::min(left, kMostLooks);
    size_t looks = most;
    const TypeSet found(TypeFinder(root, looks).of(schema, 0));
    left -= most - looks;
    return found;
  };
  for (const OrderedJson& tool : tools) {
    const OrderedJson& function = tool["function"];
    const OrderedJson& root = function["parameters"];
    Function& into = functions_[function["name"].get<std::string>()];
    // A schema that only points to the real one.
    const OrderedJson* schema = &root;
    for (int i = 0; i < kDeepestSchema && schema->is_object() && schema->contains("$ref"); ++i) {
      if (!schema->at("$ref").is_string()) break;
      try {
        schema = &resolved(root, schema->at("$ref").get<std::string>(), "$ref");
      } catch (const Error&) {
        break;
      }
    }
    if (!schema->is_object()) continue;
    if (const auto extra = schema->find("additionalProperties"); extra != schema->end())
      into.others = types(*extra, root);
    const auto properties = schema->find("properties");
    if (properties == schema->end() || !properties->is_object()) continue;
    for (const auto& [name, property] : properties->items()) into.arguments[name] = types(property, root);
  }
}

TypeSet ArgumentTypes::of(std::string_view function, std::string_view argument) const {
  const auto found = functions_.find(function);
  if (found == functions_.end()) return {};
  const auto known = found->second.arguments.find(argument);
  return known == found->second.arguments.end() ? found->second.others : known->second;
}

}  // namespace kt::inline server
