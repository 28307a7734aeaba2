// JSON Schema to networks. Each schema becomes one network that its users call; references are made once, so
// recursion is a call like any other.
#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "text/grammar/json_rules.h"
#include "text/grammar/schema_merge.h"
#include "text/grammar/schema_numbers.h"
#include "text/grammar/schema_strings.h"

namespace kt::inline texts {
namespace {

constexpr int kDeepest = 128;              // schemas within each other
constexpr int kMostSchemas = 20'000;       // compiled, counted as often as they are used
constexpr size_t kMostNodes = 200'000;     // JSON values in the schema
constexpr size_t kMostCopied = 4'000'000;  // JSON values, by merging
constexpr int64_t kMostItems = 10'000;
constexpr size_t kMostChoices = 1'000;  // alternatives of oneOf, which are compared pair by pair

size_t nodes_of(const Schema& value, int depth) {
  if (depth > kDeepest * 4) fail("json_schema: nests too far; expected at most {} levels", kDeepest * 4);
  size_t count = 1;
  if (value.is_structured())
    for (const Schema& item : value) count += nodes_of(item, depth + 1);
  return count;
}

// How strings are written that do not stand in an array or object.
enum class OuterStrings { kQuoted, kBare, kNone };

class SchemaCompiler {
 public:
  explicit SchemaCompiler(const Schema& root, OuterStrings strings = OuterStrings::kQuoted,
                          BareText bare = {})
      : root_(root), json_(builder_), strings_(strings), bare_(std::move(bare)) {
    if (nodes_of(root_, 0) > kMostNodes)
      fail("json_schema: too large; expected at most {} values", kMostNodes);
  }

  // nullptr: no value is valid.
  Grammar compile(const Schema& part, const std::string& path) {
    const StateId start = builder_.state();
    builder_.ends(builder_.after_call(start, rule(part, path)));
    return std::move(builder_).finish(start);
  }
  std::vector<SchemaProperty> properties();

 private:
  struct Reference {
    StateId start = 0;
    bool open = false;   // its network is being made
    int containers = 0;  // around it
  };

  StateId rule(const Schema& schema, const std::string& path);
  StateId any_rule(const std::string& path);
  StateId object_schema(const Schema& schema, const std::string& path);
  StateId reference_rule(const std::string& reference, const std::string& path);
  StateId choice_rule(const Schema& schema, const char* keyword, const std::string& path);
  void check_exclusive(const Schema& choices, const std::string& path) const;
  StateId constants_rule(const Schema& schema, const std::string& path);
  StateId type_rule(const Schema& schema, const std::string& type, const std::string& path);
  StateId object_rule(const Schema& schema, const std::string& path);
  StateId array_rule(const Schema& schema, const std::string& path);
  StateId inner_rule(const Schema& schema, const std::string& path);
  Schema flattened(const Schema& schema, const std::string& path, int depth);
  void pay(const Schema& copied, const std::string& path);
  // Strings are written as anywhere in JSON.
  bool quoted() const { return strings_ == OuterStrings::kQuoted || containers_ > 0; }

  const Schema& root_;
  RuleBuilder builder_;
  JsonRules json_;
  const OuterStrings strings_;
  const BareText bare_;
  std::map<std::string, Reference> references_;
  int depth_ = 0, schemas_ = 0, containers_ = 0;
  size_t copied_ = 0;
};

void SchemaCompiler::pay(const Schema& copied, const std::string& path) {
  copied_ += nodes_of(copied, 0);
  if (copied_ > kMostCopied) fail("{}: too large once allOf, anyOf and $ref are put together", path);
}

StateId SchemaCompiler::rule(const Schema& schema, const std::string& path) {
  if (++schemas_ > kMostSchemas) fail("{}: too large; expected at most {} schemas", path, kMostSchemas);
  if (depth_ >= kDeepest)
    fail("{}: nests too far; expected at most {} schemas within each other", path, kDeepest);
  if (schema == true) return any_rule(path);
  if (schema == false) return builder_.state();  // leads nowhere
  if (!schema.is_object()) fail("{}: expected a schema, an object or a boolean", path);
  ++depth_;
  const StateId made = object_schema(schema, path);
  --depth_;
  return made;
}

// Any value, of the kinds that are wanted.
StateId SchemaCompiler::any_rule(const std::string& path) {
  if (quoted()) return json_.value();
  return object_schema({{"type", {"string", "number", "boolean", "null", "object", "array"}}}, path);
}

StateId SchemaCompiler::object_schema(const Schema& schema, const std::string& path) {
  check_keywords(schema, path);
  if (schema.contains("$ref") && !constrains_beyond(schema, {"$ref"})) {
    if (!schema.at("$ref").is_string()) fail("{}.$ref: expected a string", path);
    return reference_rule(schema.at("$ref").get<std::string>(), path);
  }
  if (schema.contains("$ref") || schema.contains("allOf")) return rule(flattened(schema, path, 0), path);
  const bool any = schema.contains("anyOf"), one = schema.contains("oneOf");
  if (any && one) fail("{}: anyOf together with oneOf is not supported", path);
  if (any) return choice_rule(schema, "anyOf", path);
  if (one) return choice_rule(schema, "oneOf", path);
  if (schema.contains("enum") || schema.contains("const")) return constants_rule(schema, path);
  if (!constrains_beyond(schema, {})) return any_rule(path);
  const std::vector<std::string> types = types_of(schema, path);
  if (types.size() == 1) return type_rule(schema, types[0], path);
  const StateId start = builder_.state(), end = builder_.state();
  builder_.ends(end);
  for (const std::string& type : types) builder_.call(start, end, type_rule(schema, type, path));
  return start;
}

StateId SchemaCompiler::reference_rule(const std::string& reference, const std::string& path) {
  const std::string key = (quoted() ? "" : "outer ") + reference;
  const auto found = references_.find(key);
  if (found != references_.end()) {
    if (found->second.open && found->second.containers == containers_)
      fail("{}.$ref: leads back to itself without an object or array between", path);
    return found->second.start;
  }
  const Schema& target = resolved(root_, reference, path);
  const StateId start = builder_.state(), end = builder_.state();
  references_[key] = {start, true, containers_};
  builder_.ends(end);
  builder_.call(start, end, rule(target, path + ".$ref"));
  references_[key].open = false;
  return start;
}

// One schema without $ref and allOf at the top.
Schema SchemaCompiler::flattened(const Schema& schema, const std::string& path, int depth) {
  if (depth > kDeepest) fail("{}: allOf or $ref without end, or nested too far", path);
  if (++schemas_ > kMostSchemas) fail("{}: too large; expected at most {} schemas", path, kMostSchemas);
  if (schema.is_boolean()) return schema;
  if (!schema.is_object()) fail("{}: expected a schema, an object or a boolean", path);
  check_keywords(schema, path);
  Schema out = constraints_without(schema, {"$ref", "allOf"});
  pay(out, path);
  const auto add = [&](const Schema& part, const std::string& part_path) {
    const Schema flat = flattened(part, part_path, depth + 1);
    out = merged(out, flat, path);
    pay(out, path);
  };
  if (schema.contains("$ref")) {
    if (!schema.at("$ref").is_string()) fail("{}.$ref: expected a string", path);
    add(resolved(root_, schema.at("$ref").get<std::string>(), path), path + ".$ref");
  }
  if (!schema.contains("allOf")) return out;
  if (!schema.at("allOf").is_array()) fail("{}.allOf: expected a list", path);
  size_t index = 0;
  for (const Schema& part : schema.at("allOf")) add(part, text("{}.allOf[{}]", path, index++));
  return out;
}

StateId SchemaCompiler::choice_rule(const Schema& schema, const char* keyword, const std::string& path) {
  const Schema& choices = schema.at(keyword);
  if (!choices.is_array() || choices.empty()) fail("{}.{}: expected a list of schemas", path, keyword);
  if (std::string_view(keyword) == "oneOf") check_exclusive(choices, path);
  const Schema rest = constraints_without(schema, {keyword});
  const StateId start = builder_.state(), end = builder_.state();
  builder_.ends(end);
  size_t index = 0;
  for (const Schema& choice : choices) {
    const std::string place = text("{}.{}[{}]", path, keyword, index++);
    if (rest.empty()) {
      builder_.call(start, end, rule(choice, place));
      continue;
    }
    pay(rest, path);
    const Schema whole = merged(rest, flattened(choice, place, 0), place);
    pay(whole, path);
    builder_.call(start, end, rule(whole, place));
  }
  return start;
}

// oneOf is anyOf where no two alternatives can both hold.
void SchemaCompiler::check_exclusive(const Schema& choices, const std::string& path) const {
  if (choices.size() > kMostChoices)
    fail("{}.oneOf: {} alternatives; expected at most {}", path, choices.size(), kMostChoices);
  std::vector<const Schema*> targets;
  for (const Schema& choice : choices) {
    const Schema* at = &choice;
    for (int i = 0; i < kDeepest && at->is_object() && at->contains("$ref") && at->at("$ref").is_string();
         ++i)
      at = &resolved(root_, at->at("$ref").get<std::string>(), path);
    targets.push_back(at);
  }
  for (size_t i = 0; i < targets.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      if (!disjoint(*targets[i], *targets[j]))
        fail("{}.oneOf: alternatives {} and {} may both hold; use anyOf, or tell them apart by a constant",
             path, j, i);
}

// Whether a constant has one of the types and is within the limits that stand beside it.
bool fits(const Schema& value, const Schema& schema, const std::string& path) {
  const std::vector<std::string> types = types_of(schema, path);
  const auto has = [&](const char* type) { return std::ranges::find(types, type) != types.end(); };
  const bool whole =
      value.is_number_integer() ||
      (value.is_number_float() && value.get<double>() == static_cast<double>(static_cast<int64_t>(
                                                             std::clamp(value.get<double>(), -9e15, 9e15))));
  const bool typed = (value.is_null() && has("null")) || (value.is_boolean() && has("boolean")) ||
                     (value.is_string() && has("string")) || (value.is_array() && has("array")) ||
                     (value.is_object() && has("object")) ||
                     (value.is_number() && (has("number") || (whole && has("integer"))));
  if (!typed) return false;
  if (value.is_string()) return string_fits(value.get<std::string>(), schema, path);
  for (const auto& [keyword, limit] : schema.items()) {
    const bool of_numbers = keyword == "minimum" || keyword == "maximum" || keyword.starts_with("exclusive");
    if (value.is_number() && of_numbers) {
      if (!limit.is_number()) fail("{}.{}: expected a number", path, keyword);
      if (keyword == "minimum" && value < limit) return false;
      if (keyword == "maximum" && value > limit) return false;
      if (keyword == "exclusiveMinimum" && value <= limit) return false;
      if (keyword == "exclusiveMaximum" && value >= limit) return false;
    }
    const bool other = (value.is_number() && keyword == "multipleOf") ||
                       (value.is_array() && (keyword.ends_with("tems"))) ||
                       (value.is_object() && (keyword.ends_with("roperties") || keyword == "required"));
    if (other) fail("{}.{}: not supported beside enum or const", path, keyword);
  }
  return true;
}

StateId SchemaCompiler::constants_rule(const Schema& schema, const std::string& path) {
  Schema values = schema.contains("const") ? Schema::array({schema.at("const")}) : schema.at("enum");
  if (!values.is_array() || values.empty()) fail("{}.enum: expected a list of values", path);
  if (schema.contains("const") && schema.contains("enum") &&
      std::ranges::find(schema.at("enum"), values[0]) == schema.at("enum").end())
    values.clear();
  const Schema rest = constraints_without(schema, {"enum", "const"});
  const StateId start = builder_.state(), end = builder_.state();
  builder_.ends(end);
  std::vector<std::string> texts;
  for (const Schema& value : values) {
    if (!rest.empty() && !fits(value, rest, path)) continue;
    if (!quoted() && value.is_string() != (strings_ == OuterStrings::kBare)) continue;
    if (!quoted() && value.is_string()) {
      const std::string& bare = value.get_ref<const std::string&>();
      const bool ends = bare.find(bare_.without) != std::string::npos;
      if (!ends && (!bare_.fits || bare_.fits(bare))) texts.push_back(bare);
      continue;
    }
    if (value.is_structured())
      builder_.empty(json_.literal(start, value), end);
    else
      texts.push_back(value.is_string() ? json_text_of(value.get<std::string>()) : value.dump());
  }
  builder_.any_of(start, end, std::move(texts));
  return start;
}

StateId SchemaCompiler::type_rule(const Schema& schema, const std::string& type, const std::string& path) {
  if (!quoted() && (type == "string") != (strings_ == OuterStrings::kBare))
    return builder_.state();  // leads nowhere
  if (!quoted() && type == "string") return bare_string_rule(builder_, bare_, schema, path);
  if (type == "object") return object_rule(schema, path);
  if (type == "array") return array_rule(schema, path);
  if (type == "string") return string_rule(builder_, json_, schema, path);
  if (type == "number" || type == "integer")
    return number_rule(builder_, json_, schema, type == "integer", path);
  const StateId start = builder_.state(), end = builder_.state();
  builder_.ends(end);
  builder_.any_of(
      start, end,
      type == "null" ? std::vector<std::string>{"null"} : std::vector<std::string>{"true", "false"});
  return start;
}

StateId SchemaCompiler::inner_rule(const Schema& schema, const std::string& path) {
  ++containers_;
  const StateId made = rule(schema, path);
  --containers_;
  return made;
}

struct Property {
  std::string name;
  const Schema* schema;
  std::string path;
  bool required;
};

// Those that are named, in order, then those that are only required.
std::vector<Property> properties_of(const Schema& schema, const Schema& extra, const std::string& path) {
  std::set<std::string> required;
  std::vector<Property> out;
  std::vector<std::string> order;
  const Schema none = Schema::array();
  const Schema& listed = schema.contains("required") ? schema.at("required") : none;
  if (!listed.is_array()) fail("{}.required: expected a list of names", path);
  for (const Schema& name : listed) {
    if (!name.is_string()) fail("{}.required: expected a list of names", path);
    if (required.insert(name.get<std::string>()).second) order.push_back(name.get<std::string>());
  }
  if (schema.contains("properties")) {
    if (!schema.at("properties").is_object()) fail("{}.properties: expected an object", path);
    for (const auto& [name, inner] : schema.at("properties").items())
      out.push_back({name, &inner, path + ".properties." + name, required.erase(name) > 0});
  }
  for (const std::string& name : order)
    if (required.contains(name)) out.push_back({name, &extra, path + ".required." + name, true});
  return out;
}

// '{', then at each place either one of the properties from there on or, behind the last that must come, '}'.
StateId SchemaCompiler::object_rule(const Schema& schema, const std::string& path) {
  const Schema extra = schema.value("additionalProperties", Schema(true));
  const std::vector<Property> properties = properties_of(schema, extra, path);
  const auto required = std::ranges::count(properties, true, &Property::required);
  const int64_t least = count_of(schema, "minProperties", 0, path);
  const int64_t most = count_of(schema, "maxProperties", INT64_MAX, path);
  if (least > std::max<int64_t>(required, 1))
    fail("{}.minProperties: only what `required` makes sure, or 1, is supported", path);
  if (most < std::ssize(properties) || (most != INT64_MAX && extra != false))
    fail("{}.maxProperties: only what properties and additionalProperties make sure is supported", path);

  const StateId start = builder_.state(), open = builder_.state(), first = builder_.state(),
                close = builder_.state();
  builder_.byte(start, open, '{', extra != false ? Mark::kObjectBegin : Mark::kNone);
  builder_.call(open, first, json_.space());
  std::vector<StateId> before, after;  // property i and later ones may come; the one before i came
  for (size_t i = 0; i <= properties.size(); ++i) {
    before.push_back(builder_.state());
    after.push_back(builder_.state());
    builder_.call(builder_.bytes(after[i], ","), before[i], json_.space());
  }
  builder_.empty(first, before[0]);
  if (required == 0 && least == 0) builder_.empty(first, close);
  std::vector<std::string> names;
  bool may_close = true;
  for (size_t i = properties.size() + 1; i-- > 0;) {
    if (may_close) builder_.call(after[i], close, json_.space());
    if (i > 0) may_close &= !properties[i - 1].required;
  }
  for (size_t i = 0; i < properties.size(); ++i) {
    const Property& property = properties[i];
    names.push_back(property.name);
    if (!property.required) builder_.empty(before[i], before[i + 1]);
    const StateId value = json_.colon(builder_.bytes(before[i], json_text_of(property.name)));
    builder_.call(value, after[i + 1], inner_rule(*property.schema, property.path));
  }
  if (extra != false) {
    const StateId key = json_.free_key(before.back(), json_.key_except(names));
    builder_.call(key, after.back(), inner_rule(extra, path + ".additionalProperties"));
  }
  builder_.ends(builder_.bytes(close, "}"));
  return start;
}

StateId SchemaCompiler::array_rule(const Schema& schema, const std::string& path) {
  const int64_t least = count_of(schema, "minItems", 0, path);
  const int64_t most = count_of(schema, "maxItems", -1, path);
  if (most >= 0 && most < least) fail("{}: minItems {} is above maxItems {}", path, least, most);
  if (std::max(least, most) > kMostItems)
    fail("{}: expected at most {} in minItems and maxItems, got {}", path, kMostItems, std::max(least, most));
  std::vector<StateId> items;  // the first ones; the last stands for all that follow
  if (schema.contains("prefixItems")) {
    if (!schema.at("prefixItems").is_array()) fail("{}.prefixItems: expected a list of schemas", path);
    for (const Schema& item : schema.at("prefixItems"))
      items.push_back(inner_rule(item, text("{}.prefixItems[{}]", path, items.size())));
  }
  items.push_back(inner_rule(schema.value("items", Schema(true)), path + ".items"));

  const StateId start = builder_.state(), close = builder_.state(), end = builder_.state();
  builder_.ends(end);
  builder_.byte(close, end, ']');
  StateId before = builder_.after_call(builder_.bytes(start, "["), json_.space());
  if (least == 0) builder_.empty(before, close);
  const int64_t prefix = std::ssize(items) - 1;
  const int64_t counted = most >= 0 ? most : std::max(least, prefix) + 1;
  for (int64_t i = 0; i < counted; ++i) {
    const StateId after = builder_.after_call(before, items[static_cast<size_t>(std::min(i, prefix))]);
    if (i + 1 >= least) builder_.call(after, close, json_.space());
    const StateId comma = builder_.bytes(after, ",");
    if (i + 1 < counted)
      before = builder_.after_call(comma, json_.space());
    else if (most < 0)
      builder_.call(builder_.after_call(comma, json_.space()), after, items.back());
  }
  return start;
}

std::vector<SchemaProperty> SchemaCompiler::properties() {
  const std::string path = "json_schema";
  const Schema flat = flattened(root_, path, 0);
  if (!flat.is_object()) fail("{}: expected the schema of an object", path);
  for (const auto& [keyword, unused] : flat.items())
    if (constrains_beyond({{keyword, unused}}, {"type", "properties", "required", "additionalProperties"}))
      fail("{}.{}: cannot be held in this model's syntax of calls", path, keyword);
  const std::vector<std::string> types = types_of(flat, path);
  if (std::ranges::find(types, "object") == types.end()) fail("{}.type: expected \"object\"", path);
  const Schema extra = flat.value("additionalProperties", Schema(true));
  std::vector<SchemaProperty> out;
  for (const Property& property : properties_of(flat, extra, path))
    out.push_back({property.name, *property.schema, property.required, property.path});
  return out;
}

// What `make` makes; a value of another type than its keyword's is an Error.
auto well_formed(auto make) {
  try {
    return make();
  } catch (const Schema::exception& error) {
    fail("json_schema: malformed: {}", error.what());
  }
}

}  // namespace

Grammar json_schema_grammar(const nlohmann::ordered_json& schema) {
  return well_formed([&] {
    Grammar grammar = SchemaCompiler(schema).compile(schema, "json_schema");
    if (!grammar) fail("json_schema: no value is valid");
    return grammar;
  });
}

Grammar bare_string_grammar(const SchemaPart& schema, const BareText& text) {
  return well_formed([&] {
    return SchemaCompiler(schema.root, OuterStrings::kBare, text).compile(schema.part, schema.path);
  });
}

Grammar json_part_grammar(const SchemaPart& schema, JsonStrings strings) {
  const OuterStrings outer = strings == JsonStrings::kWith ? OuterStrings::kQuoted : OuterStrings::kNone;
  return well_formed([&] { return SchemaCompiler(schema.root, outer).compile(schema.part, schema.path); });
}

std::vector<SchemaProperty> schema_properties(const nlohmann::ordered_json& schema) {
  return well_formed([&] { return SchemaCompiler(schema).properties(); });
}

}  // namespace kt::inline texts
