#include "text/message_text.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/utf8.h"

namespace kt::inline texts {
namespace {

const std::string& part_string(const OrderedJson& part, const char* name, const std::string& place) {
  static const OrderedJson none;
  const auto found = part.find(name);
  const OrderedJson& value = found == part.end() ? none : *found;
  if (!value.is_string()) fail("{}.{}: expected a string, got {}", place, name, json_kind_of(value));
  return value.get_ref<const std::string&>();
}

const std::string& part_text(const OrderedJson& part, const std::string& place) {
  constexpr std::array<std::string_view, 3> kText = {"text", "input_text", "output_text"};
  if (!part.is_object()) fail("{}: expected an object, got {}", place, json_kind_of(part));
  const std::string& type = part_string(part, "type", place);
  if (std::ranges::find(kText, type) != kText.end()) return part_string(part, "text", place);
  if (type == "refusal") return part_string(part, "refusal", place);
  fail("{}.type: parts of type \"{}\" are not supported; expected \"text\"", place, printable(type));
}

}  // namespace

std::string_view json_kind_of(const OrderedJson& value) {
  switch (value.type()) {
    case OrderedJson::value_t::null:
      return "null";
    case OrderedJson::value_t::object:
      return "an object";
    case OrderedJson::value_t::array:
      return "an array";
    case OrderedJson::value_t::string:
      return "a string";
    case OrderedJson::value_t::boolean:
      return "a boolean";
    default:
      return "a number";
  }
}

std::string message_text(const OrderedJson& content, const std::string& place) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array())
    fail("{}: expected a string or an array of text parts, got {}", place, json_kind_of(content));
  std::string joined;
  for (size_t i = 0; i < content.size(); ++i) {
    if (i > 0) joined += '\n';
    joined += part_text(content[i], text("{}[{}]", place, i));
  }
  return joined;
}

}  // namespace kt::inline texts
