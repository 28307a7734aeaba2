// What +, <, in, [] and . do to values, with Python's meaning; and the methods of strings and dicts.
#pragma once

#include <optional>
#include <string_view>

#include "text/jinja/value.h"

namespace kt::inline texts::jinja {

// Searching text takes as long as copying it so many times.
inline constexpr size_t kSearchCost = 4;

// op is one of + - * / // % **.
Value arithmetic(std::string_view op, const Value& a, const Value& b, Meter& meter);
Value negate(const Value& v, Meter& meter);
// Less than zero, zero or more as a is before, like or behind b; an Error naming both types where Python has
// no order. NaN compares as "like" nothing: nullopt.
std::optional<int> order(const Value& a, const Value& b, Meter& meter);
// op is one of == != < <= > >= in, not in.
bool compare(std::string_view op, const Value& a, const Value& b, Meter& meter);
bool contains(const Value& item, const Value& in, Meter& meter);

// a.name: attributes and methods first, then items. a[key]: items first. Undefined where there is neither.
Value get_attribute(const Value& of, std::string_view name, Meter& meter);
Value get_item(const Value& of, const Value& key, Meter& meter);
// of[start:stop:step]; None is an absent bound.
struct Slice {
  Value start, stop, step;
};
Value get_slice(const Value& of, const Slice& slice, Meter& meter);
// Python's len().
size_t length(const Value& v, Meter& meter);

// A method bound to `of`, or None where there is no such method. Those that change a list or a dict give an
// undefined that says so.
Value find_method(const Value& of, std::string_view name, Meter& meter);

// Python's "..." % with, and "...".format(with).
std::string format_percent(const std::string& pattern, const Value& with, Meter& meter);
std::string format_braces(const std::string& pattern, const Arguments& with, Meter& meter);

// json.dumps(v, ensure_ascii, indent, separators, sort_keys).
struct JsonStyle {
  bool ascii = false;
  bool sort_keys = false;
  std::optional<std::string> indent;  // of one level
  std::string between_items = ", ", after_key = ": ";
};
std::string json_text(const Value& v, const JsonStyle& style, Meter& meter);

// Named access to the arguments of a builtin: by position, else by name. finish() refuses what was not asked
// for.
class Reader {
 public:
  Reader(std::string_view function, Arguments& arguments, Meter& meter)
      : function_(function), arguments_(arguments), used_(arguments.named.size()), meter_(meter) {}

  // The next positional argument, or the one named so, or nullopt.
  std::optional<Value> next(std::string_view name);
  Value required(std::string_view name);
  Value optional(std::string_view name, Value standard);
  std::string string(std::string_view name);
  int64_t integer(std::string_view name, std::optional<int64_t> standard = {});
  bool flag(std::string_view name, bool standard);
  void finish();

 private:
  std::string_view function_;
  Arguments& arguments_;
  std::vector<bool> used_;
  size_t at_ = 0;
  Meter& meter_;
};

}  // namespace kt::inline texts::jinja
