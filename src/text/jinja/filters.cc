// Filters over one value: text and numbers. Those over sequences are in filter_sequences.cc.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <unordered_map>

#include "base/checked.h"
#include "text/jinja/characters.h"
#include "text/jinja/interpret.h"
#include "text/jinja/operators.h"

namespace kt::inline texts::jinja {

namespace {

Value call_method(const Value& self, std::string_view name, Arguments arguments, Meter& meter) {
  return find_method(self, name, meter).callable().body(meter, arguments);
}

template <std::string (*kChange)(std::string_view)>
Value change(Interpreter& run, const Value& v, Arguments& arguments) {
  Reader("filter", arguments, run.meter()).finish();
  return make_string(kChange(to_string(v, run.meter())), run.meter());
}

std::string same(std::string_view s) { return std::string(s); }

// Words start after white space, brackets and dashes; not quite str.title().
std::string title_words(std::string_view s) {
  std::string out;
  bool inside = false;
  for (size_t at = 0; at < s.size(); at += character_bytes(s, at)) {
    const uint32_t p = code_point(s, at);
    const bool cuts = is_space(p) || p == '-' || p == '(' || p == '{' || p == '[' || p == '<';
    append_code_point(out, inside ? lower_point(p) : upper_point(p));
    inside = !cuts;
  }
  return out;
}

std::string escape_html(std::string_view s) {
  std::string out;
  for (char c : s) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '"':
        out += "&#34;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

Value trim(Interpreter& run, const Value& v, Arguments& arguments) {
  return call_method(make_string(to_string(v, run.meter()), run.meter()), "strip", arguments, run.meter());
}

Value replace(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader in("replace", arguments, meter);
  Arguments call;
  const Value old = in.required("old"), fresh = in.required("new"), count = in.optional("count", None{});
  in.finish();
  call.positional = {Value(to_string(old, meter)), Value(to_string(fresh, meter))};
  if (!count.is(Kind::kNone)) call.positional.push_back(count);
  return call_method(Value(to_string(v, meter)), "replace", call, meter);
}

Value standard(Interpreter& run, const Value& v, Arguments& arguments) {
  Reader in("default", arguments, run.meter());
  const Value other = in.optional("default_value", "");
  const bool also_false = in.flag("boolean", false);
  in.finish();
  return v.is(Kind::kUndefined) || (also_false && !truth(v)) ? other : v;
}

Value to_json(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader in("tojson", arguments, meter);
  JsonStyle style;
  style.ascii = in.flag("ensure_ascii", false);
  const Value indent = in.optional("indent", None{}), separators = in.optional("separators", None{});
  style.sort_keys = in.flag("sort_keys", false);
  in.finish();
  if (indent.is_integer()) {
    style.indent = arithmetic("*", Value(" "), indent, meter).string();
  } else if (indent.is(Kind::kString)) {
    style.indent = indent.string();
  } else if (!indent.is(Kind::kNone)) {
    meter.fail("tojson(): 'indent' must be int or str, not {}", type_name(indent));
  }
  if (style.indent) style.between_items = ",";
  if (!separators.is(Kind::kNone)) {
    const std::vector<Value> two = elements(separators, meter);
    if (two.size() != 2 || !two[0].is(Kind::kString) || !two[1].is(Kind::kString)) {
      meter.fail("tojson(): 'separators' must be two strings");
    }
    style.between_items = two[0].string();
    style.after_key = two[1].string();
  }
  return Value(json_text(v, style, meter));
}

// A number as Python's float() reads text: blanks around it, "_" between digits, "inf" and "nan".
std::optional<double> read_float(std::string_view s) {
  std::string digits;
  s = strip_space(s, Side::kBoth);
  for (size_t i = 0; i < s.size(); ++i) {
    const bool between = i > 0 && i + 1 < s.size() && std::isdigit(static_cast<unsigned char>(s[i - 1])) &&
                         std::isdigit(static_cast<unsigned char>(s[i + 1]));
    if (s[i] == '_' && between) continue;
    if (s[i] == '_' || s[i] == 'x' || s[i] == 'X' || s[i] == '(') return {};  // strtod reads more than Python
    digits += s[i];
  }
  if (digits.empty() || is_space(static_cast<unsigned char>(digits[0]))) return {};
  char* end = nullptr;
  const double v = std::strtod(digits.c_str(), &end);
  if (end != digits.c_str() + digits.size()) return {};
  return v;
}

std::optional<int64_t> read_integer(std::string_view s, int base) {
  s = strip_space(s, Side::kBoth);
  std::string digits;
  for (size_t i = 0; i < s.size(); ++i) {
    if (s[i] != '_') {
      digits += s[i];
    } else if (i == 0 || i + 1 == s.size() || s[i + 1] == '_' ||
               !std::isalnum(static_cast<unsigned char>(s[i - 1]))) {
      return {};
    }
  }
  if (digits.empty() || digits.size() > 72) return {};
  const size_t sign = digits[0] == '-' || digits[0] == '+' ? 1 : 0;
  const char mark =
      digits.size() > sign + 1 && digits[sign] == '0' ? static_cast<char>(digits[sign + 1] | 32) : '\0';
  const int named = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 0;
  if (named && (base == named || base == 0)) {
    digits.erase(sign, 2);
    base = named;
  } else if (base == 0) {
    base = 10;
  }
  if (digits.size() <= sign || !std::isalnum(static_cast<unsigned char>(digits[sign]))) return {};
  char* end = nullptr;
  errno = 0;
  const long long v = std::strtoll(digits.c_str(), &end, base);
  if (end != digits.c_str() + digits.size() || errno) return {};
  return v;
}

std::optional<int64_t> whole(double v) {
  if (!(v > -9.3e18 && v < 9.3e18)) return {};
  if (v >= 9223372036854775808.0 || v < -9223372036854775808.0) return {};
  return static_cast<int64_t>(v);
}

Value to_int(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader in("int", arguments, meter);
  const Value other = in.optional("default", 0);
  const int64_t base = in.integer("base", 10);
  in.finish();
  require_defined(v, meter);
  if (base < 0 || base == 1 || base > 36) meter.fail("int() base must be >= 2 and <= 36, or 0");
  if (v.is_integer()) return v.integer();
  std::optional<int64_t> out;
  if (v.is(Kind::kFloat)) {
    if (std::isinf(v.number())) meter.fail("cannot convert float infinity to integer");
    out = whole(v.number());
    if (!out && !std::isnan(v.number())) meter.fail("{} does not fit 64 bits", v.number());
  } else if (v.is(Kind::kString)) {
    out = read_integer(v.string(), static_cast<int>(base));
    if (!out) {
      if (const std::optional<double> d = read_float(v.string())) out = whole(*d);
    }
  }
  return out ? Value(*out) : other;
}

Value to_float(Interpreter& run, const Value& v, Arguments& arguments) {
  Reader in("float", arguments, run.meter());
  const Value other = in.optional("default", 0.0);
  in.finish();
  require_defined(v, run.meter());
  if (v.is_number()) return v.number();
  const std::optional<double> out = v.is(Kind::kString) ? read_float(v.string()) : std::nullopt;
  return out ? Value(*out) : other;
}

Value absolute(Interpreter& run, const Value& v, Arguments& arguments) {
  Reader("abs", arguments, run.meter()).finish();
  require_defined(v, run.meter());
  if (v.is_integer()) return v.integer() < 0 ? negate(v, run.meter()) : Value(v.integer());
  if (v.is(Kind::kFloat)) return std::fabs(v.number());
  run.meter().fail("bad operand type for abs(): '{}'", type_name(v));
}

Value round_to(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader in("round", arguments, meter);
  const int64_t precision = std::clamp<int64_t>(in.integer("precision", 0), -400, 400);
  const Value method = in.optional("method", "common");
  in.finish();
  require_defined(v, meter);
  if (!v.is_number()) meter.fail("type {} doesn't define __round__ method", type_name(v));
  const std::string how = to_string(method, meter);
  const double scale = std::pow(10.0, static_cast<double>(precision));
  if (how == "ceil") return std::ceil(v.number() * scale) / scale;
  if (how == "floor") return std::floor(v.number() * scale) / scale;
  if (how != "common") meter.fail("method must be common, ceil or floor");
  if (v.is_integer() && precision >= 0) return v.integer();
  if (precision < 0) {
    const double out = std::nearbyint(v.number() * scale) / scale;
    return v.is_integer() ? Value(whole(out).value_or(0)) : Value(out);
  }
  // printf rounds the exact binary value, as Python does; scaling first would round twice.
  char digits[800];
  std::snprintf(digits, sizeof digits, "%.*f", static_cast<int>(precision), v.number());
  return std::strtod(digits, nullptr);
}

Value indent(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader in("indent", arguments, meter);
  const Value width = in.optional("width", 4);
  const bool first = in.flag("first", false), blank = in.flag("blank", false);
  in.finish();
  require_defined(v, meter);
  if (!v.is(Kind::kString)) meter.fail("indent needs str, not {}", type_name(v));
  const Value room = width.is(Kind::kString) ? width : arithmetic("*", Value(" "), width, meter);
  const std::string source = v.string() + "\n";
  meter.step(static_cast<int64_t>(std::count(source.begin(), source.end(), '\n')));
  std::string out = first ? room.string() : "";
  bool fresh = true;
  for (std::string_view line : split_lines(source)) {
    if (!fresh) {
      out += "\n";
      if (blank || !line.empty()) out += room.string();
    }
    fresh = false;
    out += line;
    meter.work(room.string().size());
    meter.fits(out.size());
  }
  return make_string(std::move(out), meter);
}

Value word_count(Interpreter& run, const Value& v, Arguments& arguments) {
  Reader("wordcount", arguments, run.meter()).finish();
  int64_t count = 0;
  bool inside = false;
  for (char c : to_string(v, run.meter())) {
    const auto b = static_cast<unsigned char>(c);
    const bool word = b >= 0x80 || std::isalnum(b) || c == '_';
    count += word && !inside;
    inside = word;
  }
  return count;
}

Value format(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  if (!arguments.positional.empty() && !arguments.named.empty()) {
    meter.fail("format: can't handle positional and keyword arguments at the same time");
  }
  Value with;
  if (arguments.named.empty()) {
    with = make_tuple(arguments.positional, meter);
  } else {
    std::vector<std::pair<Value, Value>> items;
    for (auto& [key, value] : arguments.named) items.emplace_back(key, value);
    with = make_dict(std::move(items), meter);
  }
  return make_string(format_percent(to_string(v, meter), with, meter), meter);
}

Value truncate(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader in("truncate", arguments, meter);
  const int64_t limit = in.integer("length", 255);
  const bool cut_words = in.flag("killwords", false);
  const std::string end = to_string(in.optional("end", "..."), meter);
  const int64_t leeway = in.integer("leeway", 5);
  in.finish();
  const auto tail = static_cast<int64_t>(count_characters(end));
  if (!v.is(Kind::kString)) meter.fail("truncate needs str, not {}", type_name(v));
  if (limit < tail || leeway < 0) meter.fail("truncate: expected length >= {}, got {}", tail, limit);
  if (static_cast<int64_t>(length(v, meter)) <= checked_add(limit, leeway, "truncate")) return v;
  std::string_view kept = character_range(v.string(), 0, static_cast<size_t>(limit - tail));
  if (!cut_words) kept = kept.substr(0, kept.rfind(' '));
  return make_string(std::string(kept) + end, meter);
}

Value center(Interpreter& run, const Value& v, Arguments& arguments) {
  if (arguments.positional.empty() && arguments.named.empty()) arguments.positional = {Value(80)};
  return call_method(Value(to_string(v, run.meter())), "center", arguments, run.meter());
}

Value attribute(Interpreter& run, const Value& v, Arguments& arguments) {
  Reader in("attr", arguments, run.meter());
  const std::string name = in.string("name");
  in.finish();
  if (v.is(Kind::kDict)) {  // attributes only, never items
    const Value method = find_method(v, name, run.meter());
    return method.is(Kind::kNone) ? Value::undefined(text("'dict object' has no attribute '{}'", name))
                                  : method;
  }
  return get_attribute(v, name, run.meter());
}

}  // namespace

Filter find_filter(std::string_view name) {
  static const std::unordered_map<std::string_view, Filter> table{
      {"upper", change<upper>},
      {"lower", change<lower>},
      {"title", change<title_words>},
      {"capitalize", change<capitalize>},
      {"string", change<same>},
      {"safe", change<same>},
      {"e", change<escape_html>},
      {"escape", change<escape_html>},
      {"forceescape", change<escape_html>},
      {"trim", trim},
      {"replace", replace},
      {"default", standard},
      {"d", standard},
      {"tojson", to_json},
      {"int", to_int},
      {"float", to_float},
      {"abs", absolute},
      {"round", round_to},
      {"indent", indent},
      {"wordcount", word_count},
      {"format", format},
      {"truncate", truncate},
      {"center", center},
      {"attr", attribute},
  };
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

}  // namespace kt::inline texts::jinja
