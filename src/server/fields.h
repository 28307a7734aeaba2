// Typed access to the fields of a request's JSON: absent and null are the same, anything else of the wrong
// type or out of range is an ApiError(400) that names the field, what was expected and what came.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "http/message.h"
#include "text/json.h"

namespace kt::inline server {

// The body as an object; the request's own is freed. ApiError(400) for what is not JSON, not an object, nests or counts
// too far.
OrderedJson parse_body(HttpRequest& request);

// A value for an error message: short, on one line.
std::string shown_value(const OrderedJson& value);

class Fields {
 public:
  // `object` must outlive this; `path` goes before names in errors ("stream_options.").
  explicit Fields(const OrderedJson& object, std::string path = {})
      : object_(object), path_(std::move(path)) {}

  Fields(const OrderedJson&&, std::string = {}) = delete;

  const OrderedJson* find(const char* name) const;  // null: absent
  std::optional<double> number(const char* name, double low, double high) const;
  std::optional<int64_t> integer(const char* name, int64_t low, int64_t high) const;
  bool flag(const char* name, bool otherwise) const;
  std::optional<std::string> string(const char* name) const;
  std::optional<Fields> object(const char* name) const;
  // A string or a list of strings.
  std::vector<std::string> strings(const char* name, size_t most) const;
  std::vector<int32_t> token_ids(const char* name) const;

  [[noreturn]] void refuse(const char* name, std::string_view expected) const;  // with what came
  [[noreturn]] void refuse_as(const char* name, const std::string& message) const;

 private:
  const OrderedJson& object_;
  std::string path_;
};

// On one line; bytes that are no UTF-8 become U+FFFD.
std::string json_text(const OrderedJson& value);
// The string as JSON, quotes and all; bytes that are no UTF-8 become U+FFFD.
std::string json_string(std::string_view characters);

}  // namespace kt::inline server
