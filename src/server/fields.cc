#include "server/fields.h"

#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "server/api_error.h"

namespace kt::inline server {
namespace {

constexpr JsonLimits kBodyLimits{.bytes = 64u << 20, .depth = 64, .values = 1u << 20};
constexpr size_t kShownBytes = 60;

}  // namespace

OrderedJson parse_body(HttpRequest& request) {
  const std::string bytes = std::exchange(request.body, {});
  OrderedJson body;
  try {
    body = parse_ordered_json(bytes, "body", kBodyLimits);
  } catch (const Error& error) {
    throw ApiError(400, error.what());
  }
  if (!body.is_object()) throw ApiError(400, text("body: expected an object, got {}", shown_value(body)));
  return body;
}

std::string shown_value(const OrderedJson& value) {
  if (value.is_object() || value.is_array())
    return text("{} of {}", value.is_object() ? "an object" : "a list", value.size());
  std::string out = value.dump(-1, ' ', true, OrderedJson::error_handler_t::replace);
  if (out.size() > kShownBytes) out = out.substr(0, kShownBytes) + "...";
  return out;
}

const OrderedJson* Fields::find(const char* name) const {
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

void Fields::refuse_as(const char* name, const std::string& message) const {
  throw ApiError(400, text("{}{}: {}", path_, name, message), path_ + name);
}

void Fields::refuse(const char* name, std::string_view expected) const {
  const OrderedJson* value = find(name);
  refuse_as(name, text("expected {}, got {}", expected, value ? shown_value(*value) : "nothing"));
}

std::optional<double> Fields::number(const char* name, double low, double high) const {
  const OrderedJson* value = find(name);
  if (!value) return std::nullopt;
  const double number = value->is_number() ? value->get<double>() : std::nan("");
  if (!(number >= low && number <= high)) refuse(name, text("a number in [{}, {}]", low, high));
  return number;
}

std::optional<int64_t> Fields::integer(const char* name, int64_t low, int64_t high) const {
  const OrderedJson* value = find(name);
  if (!value) return std::nullopt;
  std::optional<int64_t> found;
  if (value->is_number_unsigned()) {
    const auto number = value->get<uint64_t>();
    if (number <= static_cast<uint64_t>(INT64_MAX)) found = static_cast<int64_t>(number);
  } else if (value->is_number_integer()) {
    found = value->get<int64_t>();
  } else if (value->is_number_float()) {  // 3.0 is an integer too, as JSON has one kind of number
    const auto number = value->get<double>();
    if (number == std::floor(number) && std::abs(number) < 0x1p63) found = static_cast<int64_t>(number);
  }
  if (!found || *found < low || *found > high) refuse(name, text("an integer in [{}, {}]", low, high));
  return found;
}

bool Fields::flag(const char* name, bool otherwise) const {
  const OrderedJson* value = find(name);
  if (!value) return otherwise;
  if (!value->is_boolean()) refuse(name, "true or false");
  return value->get<bool>();
}

std::optional<std::string> Fields::string(const char* name) const {
  const OrderedJson* value = find(name);
  if (!value) return std::nullopt;
  if (!value->is_string()) refuse(name, "a string");
  return value->get<std::string>();
}

std::optional<Fields> Fields::object(const char* name) const {
  const OrderedJson* value = find(name);
  if (!value) return std::nullopt;
  if (!value->is_object()) refuse(name, "an object");
  return Fields(*value, path_ + name + ".");
}

std::vector<std::string> Fields::strings(const char* name, size_t most) const {
  const OrderedJson* value = find(name);
  if (!value) return {};
  if (value->is_string()) return {value->get<std::string>()};
  const std::string expected = text("a string or a list of at most {} strings", most);
  if (!value->is_array() || value->size() > most) refuse(name, expected);
  std::vector<std::string> out;
  for (const OrderedJson& entry : *value) {
    if (!entry.is_string()) refuse_as(name, text("expected {}, one is {}", expected, shown_value(entry)));
    out.push_back(entry.get<std::string>());
  }
  return out;
}

std::vector<int32_t> Fields::token_ids(const char* name) const {
  const OrderedJson* value = find(name);
  if (!value || !value->is_array()) refuse(name, "a list of token ids");
  std::vector<int32_t> out;
  out.reserve(value->size());
  for (const OrderedJson& entry : *value) {
    const bool small = entry.is_number_unsigned() && entry.get<uint64_t>() <= INT32_MAX;
    if (!small) refuse_as(name, text("expected token ids, one is {}", shown_value(entry)));
    out.push_back(entry.get<int32_t>());
  }
  return out;
}

std::string json_text(const OrderedJson& value) {
  return value.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

std::string json_string(std::string_view characters) { return json_text(characters); }

}  // namespace kt::inline server
