// Python's two ways to put values into a pattern: "%s" % x and "{}".format(x). The plain forms; no field
// widths in the second.
#include <cmath>
#include <cstdio>

#include "text/jinja/characters.h"
#include "text/jinja/operators.h"

namespace kt::inline texts::jinja {

namespace {

// One "%..." directive.
struct Directive {
  std::string key;
  std::string flags;
  int64_t width = 0, precision = -1;
  char type = 0;
};

class PercentFormat {
 public:
  PercentFormat(const std::string& pattern, const Value& with, Meter& meter)
      : pattern_(pattern), with_(with), meter_(meter) {}

  std::string run() {
    const bool tuple = with_.is(Kind::kSequence) && with_.sequence().kind == SequenceKind::kTuple;
    values_ = tuple ? with_.sequence().items : std::vector<Value>{with_};
    std::string out;
    while (at_ < pattern_.size()) {
      if (pattern_[at_] != '%') {
        out += pattern_[at_++];
        continue;
      }
      ++at_;
      const Directive d = read();
      meter_.step();
      out += d.type == '%' ? "%" : one(d);
      meter_.fits(out.size());
    }
    const bool looked_up = with_.is(Kind::kDict) || with_.is(Kind::kUndefined) ||
                           type_name(with_) == "list" || type_name(with_) == "range";
    if (used_ < values_.size() && !looked_up)
      meter_.fail("not all arguments converted during string formatting");
    return out;
  }

 private:
  int64_t number() {
    int64_t out = 0;
    while (at_ < pattern_.size() && pattern_[at_] >= '0' && pattern_[at_] <= '9') {
      out = out * 10 + (pattern_[at_++] - '0');
      if (out > 10'000) meter_.fail("a field wider than 10000");
    }
    return out;
  }

  Directive read() {
    Directive d;
    if (at_ < pattern_.size() && pattern_[at_] == '(') {
      const size_t end = pattern_.find(')', at_);
      if (end == std::string::npos) meter_.fail("incomplete format key");
      d.key = pattern_.substr(at_ + 1, end - at_ - 1);
      at_ = end + 1;
    }
    while (at_ < pattern_.size() && std::string_view("-+ 0#").find(pattern_[at_]) != std::string_view::npos) {
      if (d.flags.size() < 8) d.flags += pattern_[at_];
      ++at_;
    }
    d.width = number();
    if (at_ < pattern_.size() && pattern_[at_] == '.') {
      ++at_;
      d.precision = number();
    }
    if (at_ == pattern_.size()) meter_.fail("incomplete format");
    d.type = pattern_[at_++];
    return d;
  }

  Value value(const Directive& d) {
    if (!d.key.empty()) {
      if (!with_.is(Kind::kDict)) meter_.fail("format requires a mapping");
      const Value* found = with_.dict().find(d.key);
      if (!found) meter_.fail("no value for %({})", d.key);
      return *found;
    }
    if (used_ >= values_.size()) meter_.fail("not enough arguments for format string");
    return values_[used_++];
  }

  std::string padded(const Directive& d, std::string s) {
    const auto size = static_cast<int64_t>(count_characters(s));
    if (size >= d.width) return s;
    const std::string room(static_cast<size_t>(d.width - size), ' ');
    return d.flags.find('-') != std::string::npos ? s + room : room + s;
  }

  std::string one(const Directive& d) {
    const Value v = value(d);
    if (d.type == 's' || d.type == 'r') {
      std::string s = d.type == 's' ? to_string(v, meter_) : to_repr(v, meter_);
      if (d.precision >= 0)
        s = character_range(s, 0, std::min(static_cast<size_t>(d.precision), count_characters(s)));
      return padded(d, std::move(s));
    }
    const bool whole = d.type == 'd' || d.type == 'i' || d.type == 'x' || d.type == 'X' || d.type == 'o';
    if (!whole && std::string_view("feEgGF").find(d.type) == std::string_view::npos) {
      meter_.fail("unsupported format character '{}'", d.type);
    }
    require_defined(v, meter_);
    if (!v.is_number()) meter_.fail("%{} format: a real number is required, not {}", d.type, type_name(v));
    std::string code = "%" + d.flags + "*";
    if (d.precision >= 0) code += "." + std::to_string(d.precision);
    char out[24'000];
    if (whole) {
      if (v.is(Kind::kFloat) && d.type != 'd' && d.type != 'i')
        meter_.fail("%{} format: an integer is required", d.type);
      if (v.is(Kind::kFloat) && !(std::fabs(v.number()) < 9.2e18))
        meter_.fail("%d of {} does not fit 64 bits", v.number());
      const long long n = v.is(Kind::kFloat) ? static_cast<long long>(v.number()) : v.integer();
      if (n < 0 && d.type != 'd' && d.type != 'i')
        meter_.fail("%{} of a negative number is not supported", d.type);
      std::snprintf(out, sizeof out, (code + "ll" + d.type).c_str(), static_cast<int>(d.width), n);
    } else {
      std::snprintf(out, sizeof out, (code + d.type).c_str(), static_cast<int>(d.width), v.number());
    }
    return out;
  }

  const std::string& pattern_;
  const Value& with_;
  Meter& meter_;
  std::vector<Value> values_;
  size_t at_ = 0, used_ = 0;
};

}  // namespace

std::string format_percent(const std::string& pattern, const Value& with, Meter& meter) {
  meter.work(pattern.size());
  return PercentFormat(pattern, with, meter).run();
}

std::string format_braces(const std::string& pattern, const Arguments& with, Meter& meter) {
  std::string out;
  size_t automatic = 0;
  bool numbered = false;
  for (size_t at = 0; at < pattern.size(); ++at) {
    const char c = pattern[at];
    if ((c == '{' || c == '}') && at + 1 < pattern.size() && pattern[at + 1] == c) {
      out += c;
      ++at;
      continue;
    }
    if (c == '}') meter.fail("single '}' encountered in format string");
    if (c != '{') {
      out += c;
      continue;
    }
    const size_t end = pattern.find('}', at);
    if (end == std::string::npos) meter.fail("expected '}' before end of string");
    std::string field = pattern.substr(at + 1, end - at - 1);
    at = end;
    meter.step();
    const bool repr = field.ends_with("!r");
    if (repr || field.ends_with("!s")) field.resize(field.size() - 2);
    if (field.find_first_of(":.[{!") != std::string::npos)
      meter.fail("format field '{}' is not supported", field);
    const bool digits = field.find_first_not_of("0123456789") == std::string::npos;
    const Value* value = nullptr;
    if (digits) {
      numbered |= !field.empty();
      if (numbered && (field.empty() || automatic))
        meter.fail("cannot mix automatic and manual field numbering");
      const size_t index = field.empty() ? automatic++ : field.size() > 6 ? SIZE_MAX : std::stoul(field);
      if (index < with.positional.size()) value = &with.positional[index];
    } else {
      for (const auto& [key, named] : with.named) {
        if (key == field) value = &named;
      }
    }
    if (!value) meter.fail("no value for format field '{}'", field);
    out += repr ? to_repr(*value, meter) : to_string(*value, meter);
    meter.fits(out.size());
  }
  return out;
}

}  // namespace kt::inline texts::jinja
