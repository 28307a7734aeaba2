#include "base/error.h"
#include "base/utf8.h"
#include "server/syntax/call_grammar.h"
#include "server/syntax/call_reader.h"

namespace kt::inline server {
namespace {

// One argument of a call.
struct TagValue {
  const CallWriter& writer;
  const OrderedJson& root;
  const SchemaProperty& property;
  TypeSet types;

  Grammar marker(std::string_view spelled) const { return marker_grammar(spelled, writer.tokenizer); }
  Grammar bare() const;
  Grammar json(JsonStrings strings) const;
  Grammar written(std::string_view key_end, Grammar value) const;
  Grammar whole() const;
};

Grammar line_of(const CallWriter& writer) { return literal_grammar(std::string(writer.syntax.line)); }

Grammar TagValue::bare() const {
  BareText text{.without = std::string(writer.syntax.tags.value_end)};
  const bool typed = !writer.syntax.tags.string_key_end.empty();
  if (!types.only_string() && !typed) {
    text.not_first = ambiguous_beginnings(types);
    text.fits = [mask = types](const std::string& constant) {
      return json_of_bare(constant, mask) == json_of_bare(constant, TypeSet(TypeSet::kString));
    };
  }
  return bare_string_grammar({root, property.schema, property.path}, text);
}

Grammar TagValue::json(JsonStrings strings) const {
  return json_part_grammar({root, property.schema, property.path}, strings);
}

Grammar TagValue::written(std::string_view key_end, Grammar value) const {
  const TagMarkers& tags = writer.syntax.tags;
  std::vector<Grammar> parts = {marker(tags.key_begin), literal_grammar(property.name), marker(key_end)};
  if (!tags.value_begin.empty()) {
    parts.push_back(line_of(writer));
    parts.push_back(marker(tags.value_begin));
  }
  if (tags.value_lines) parts.push_back(literal_grammar("\n"));
  parts.push_back(std::move(value));
  if (tags.value_lines) parts.push_back(literal_grammar("\n"));
  parts.push_back(marker(tags.value_end));
  parts.push_back(line_of(writer));
  return sequence_grammar(parts);
}

// By its types, as the reader will read it: JSON where there is no string or anything may come, else both ways.
Grammar TagValue::whole() const {
  const TagMarkers& tags = writer.syntax.tags;
  const bool typed = !tags.string_key_end.empty();
  const std::string_view json_end = typed ? tags.json_key_end : tags.key_end,
                         string_end = typed ? tags.string_key_end : tags.key_end;
  std::vector<Grammar> ways;
  const auto add = [&](std::string_view key_end, const Grammar& value) {
    if (value) ways.push_back(written(key_end, value));
  };
  if (types.any() || !types.has(TypeSet::kString)) {
    add(json_end, json(JsonStrings::kWith));
  } else {
    add(string_end, bare());
    if (!types.only_string()) add(json_end, json(JsonStrings::kWithout));
  }
  if (ways.empty() && property.required)
    fail("{}: no value is valid, or none can be written bare", property.path);
  if (ways.empty()) return literal_grammar("");
  return ways.size() == 1 ? ways[0] : choice_grammar(ways);
}

void check_key(const SchemaProperty& property, const TagMarkers& tags) {
  const std::string& name = property.name;
  if (name.empty() || name.size() > kLongestCallName / 2 || trimmed(name) != name ||
      name.find_first_of("\n<>\"") != std::string::npos || name.find(tags.key_end[0]) != std::string::npos)
    fail("{}: the name \"{}\" cannot be written in this model's syntax of calls", property.path,
         printable(name));
}

}  // namespace

Grammar tag_call_grammar(const CallWriter& writer, const OrderedJson& function) {
  const CallSyntax& row = writer.syntax;
  const std::string& name = function["name"].get_ref<const std::string&>();
  const OrderedJson& schema = function["parameters"];
  const auto mark = [&](std::string_view spelled) { return marker_grammar(spelled, writer.tokenizer); };
  std::vector<Grammar> parts = {mark(row.markers.call_begin)};
  if (!row.tags.name_begin.empty()) {
    parts.push_back(line_of(writer));
    parts.push_back(mark(row.tags.name_begin));
  }
  parts.push_back(literal_grammar(name));
  parts.push_back(mark(row.tags.name_end));
  parts.push_back(literal_grammar(std::string(row.name_line)));
  size_t states = 0;
  for (const SchemaProperty& property : schema_properties(schema)) {
    check_key(property, row.tags);
    const TagValue value{writer, schema, property, writer.types.of(name, property.name)};
    Grammar whole = value.whole();
    // Each by itself may be as large as a whole schema: no more of them are made than all may be.
    if ((states += grammar_size(whole)) > kMostCallStates)
      fail("grammar: too large; expected at most {} states, \"{}\" is the first too many", kMostCallStates,
           printable(property.name));
    if (!property.required) whole = choice_grammar({std::move(whole), literal_grammar("")});
    parts.push_back(std::move(whole));
  }
  if (!row.tags.body_end.empty()) {
    parts.push_back(mark(row.tags.body_end));
    parts.push_back(line_of(writer));
  }
  parts.push_back(mark(row.markers.call_end));
  return sequence_grammar(parts);
}

}  // namespace kt::inline server
