#include "text/jinja/operators.h"

#include <algorithm>
#include <cmath>

#include "text/jinja/characters.h"

namespace kt::inline texts::jinja {

namespace {

[[noreturn]] void no_operation(std::string_view op, const Value& a, const Value& b, Meter& meter) {
  meter.fail("unsupported operand types for {}: '{}' and '{}'", op, type_name(a), type_name(b));
}

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a % b < 0) != (b < 0)); }

Value integer_power(int64_t a, int64_t b, Meter& meter) {
  if (b < 0) {
    if (a == 0) meter.fail("0 cannot be raised to a negative power");
    return std::pow(static_cast<double>(a), static_cast<double>(b));
  }
  int64_t out = 1;
  if (a == 0 || a == 1) return b == 0 ? int64_t{1} : a;
  if (a == -1) return b % 2 ? int64_t{-1} : int64_t{1};
  for (int64_t i = 0; i < b; ++i) {
    if (__builtin_mul_overflow(out, a, &out)) meter.fail("{} ** {} does not fit 64 bits", a, b);
  }
  return out;
}

Value integer_arithmetic(std::string_view op, int64_t a, int64_t b, Meter& meter) {
  int64_t out = 0;
  bool overflow = false;
  if (op == "+") {
    overflow = __builtin_add_overflow(a, b, &out);
  } else if (op == "-") {
    overflow = __builtin_sub_overflow(a, b, &out);
  } else if (op == "*") {
    overflow = __builtin_mul_overflow(a, b, &out);
  } else if (op == "**") {
    return integer_power(a, b, meter);
  } else {
    if (b == 0) meter.fail("division by zero");
    if (op == "/") return static_cast<double>(a) / static_cast<double>(b);
    if (b == -1) {
      overflow = op == "//" && __builtin_sub_overflow(int64_t{0}, a, &out);
    } else {
      const int64_t quotient = floor_div(a, b);
      out = op == "//" ? quotient : a - quotient * b;
    }
  }
  if (overflow) meter.fail("{} {} {} does not fit 64 bits", a, op, b);
  return out;
}

Value float_arithmetic(std::string_view op, double a, double b, Meter& meter) {
  if (op == "+") return a + b;
  if (op == "-") return a - b;
  if (op == "*") return a * b;
  if (op == "**") {
    if (a == 0 && b < 0) meter.fail("0.0 cannot be raised to a negative power");
    if (a < 0 && b != std::floor(b)) meter.fail("complex numbers are not supported");
    const double out = std::pow(a, b);
    if (std::isinf(out) && !std::isinf(a) && !std::isinf(b)) meter.fail("numerical result out of range");
    return out;
  }
  if (b == 0) meter.fail("division by zero");
  if (op == "/") return a / b;
  double rest = std::fmod(a, b);
  if (rest != 0 && (rest < 0) != (b < 0)) rest += b;
  if (op == "%") return rest == 0 ? std::copysign(0.0, b) : rest;
  return std::round((a - rest) / b);
}

Value repeat(const Value& what, int64_t times, Meter& meter) {
  const size_t count = times < 0 ? 0 : static_cast<size_t>(times);
  const size_t unit =
      what.is(Kind::kString) ? what.string().size() : what.sequence().items.size() * sizeof(Value);
  size_t bytes = 0;
  if (__builtin_mul_overflow(unit, count, &bytes)) bytes = SIZE_MAX;
  meter.value(bytes);
  if (what.is(Kind::kString)) {
    std::string out;
    out.reserve(bytes);
    for (size_t i = 0; i < count && unit; ++i) out += what.string();
    return Value(std::move(out));
  }
  std::vector<Value> out;
  const auto& items = what.sequence().items;
  for (size_t i = 0; i < count && unit; ++i) out.insert(out.end(), items.begin(), items.end());
  return make_sequence(std::move(out), what.sequence().kind, meter);
}

bool is_plain(const Value& v) {
  return v.is(Kind::kSequence) &&
         (v.sequence().kind == SequenceKind::kList || v.sequence().kind == SequenceKind::kTuple);
}

}  // namespace

Value arithmetic(std::string_view op, const Value& a, const Value& b, Meter& meter) {
  require_defined(a, meter);
  if (op == "%" && a.is(Kind::kString)) return make_string(format_percent(a.string(), b, meter), meter);
  require_defined(b, meter);
  if (a.is_integer() && b.is_integer()) return integer_arithmetic(op, a.integer(), b.integer(), meter);
  if (a.is_number() && b.is_number()) return float_arithmetic(op, a.number(), b.number(), meter);
  if (op == "+" && a.is(Kind::kString) && b.is(Kind::kString)) {
    meter.value(a.string().size() + b.string().size());
    return Value(a.string() + b.string());
  }
  if (op == "+" && is_plain(a) && is_plain(b) && a.sequence().kind == b.sequence().kind) {
    std::vector<Value> out = a.sequence().items;
    out.insert(out.end(), b.sequence().items.begin(), b.sequence().items.end());
    return make_sequence(std::move(out), a.sequence().kind, meter);
  }
  if (op == "*" && (a.is(Kind::kString) || is_plain(a)) && b.is_integer())
    return repeat(a, b.integer(), meter);
  if (op == "*" && (b.is(Kind::kString) || is_plain(b)) && a.is_integer())
    return repeat(b, a.integer(), meter);
  no_operation(op, a, b, meter);
}

Value negate(const Value& v, Meter& meter) {
  require_defined(v, meter);
  if (v.is_integer()) return integer_arithmetic("-", 0, v.integer(), meter);
  if (v.is(Kind::kFloat)) return -v.number();
  meter.fail("bad operand type for unary -: '{}'", type_name(v));
}

std::optional<int> order(const Value& a, const Value& b, Meter& meter) {
  meter.step();
  require_defined(a, meter);
  require_defined(b, meter);
  if (a.is_integer() && b.is_integer()) return (a.integer() > b.integer()) - (a.integer() < b.integer());
  if (a.is_number() && b.is_number()) {
    if (std::isnan(a.number()) || std::isnan(b.number())) return std::nullopt;
    return (a.number() > b.number()) - (a.number() < b.number());
  }
  if (a.is(Kind::kString) && b.is(Kind::kString)) {  // bytes of UTF-8 order as code points do
    meter.work(std::min(a.string().size(), b.string().size()) / 8);
    const int c = a.string().compare(b.string());
    return (c > 0) - (c < 0);
  }
  if (is_plain(a) && is_plain(b) && a.sequence().kind == b.sequence().kind) {
    const auto &x = a.sequence().items, &y = b.sequence().items;
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!equals(x[i], y[i], meter)) return order(x[i], y[i], meter);
    }
    return (x.size() > y.size()) - (x.size() < y.size());
  }
  meter.fail("'<' not supported between instances of '{}' and '{}'", type_name(a), type_name(b));
}

bool compare(std::string_view op, const Value& a, const Value& b, Meter& meter) {
  if (op == "==") return equals(a, b, meter);
  if (op == "!=") return !equals(a, b, meter);
  if (op == "in") return contains(a, b, meter);
  if (op == "not in") return !contains(a, b, meter);
  const std::optional<int> c = order(a, b, meter);
  if (!c) return false;
  if (op == "<") return *c < 0;
  if (op == "<=") return *c <= 0;
  return op == ">" ? *c > 0 : *c >= 0;
}

bool contains(const Value& item, const Value& in, Meter& meter) {
  if (in.is(Kind::kString)) {
    if (!item.is(Kind::kString)) {
      meter.fail("'in <string>' requires string as left operand, not {}", type_name(item));
    }
    meter.work(kSearchCost * in.string().size());
    return find_bytes(in.string(), item.string()) != std::string_view::npos;
  }
  if (in.is(Kind::kDict)) {
    if (item.is(Kind::kDict) || (item.is(Kind::kSequence) && item.sequence().kind == SequenceKind::kList)) {
      meter.fail("unhashable type: '{}'", type_name(item));
    }
    return in.dict().find(item, meter) != nullptr;
  }
  if (in.is(Kind::kUndefined)) return false;
  if (!in.is(Kind::kSequence)) meter.fail("argument of type '{}' is not iterable", type_name(in));
  if (in.sequence().kind == SequenceKind::kIterator) {
    const std::vector<Value> items = elements(in, meter);
    return std::any_of(items.begin(), items.end(), [&](const Value& v) { return equals(item, v, meter); });
  }
  const auto& items = in.sequence().items;
  return std::any_of(items.begin(), items.end(), [&](const Value& v) { return equals(item, v, meter); });
}

size_t length(const Value& v, Meter& meter) {
  switch (v.kind()) {
    case Kind::kUndefined:
      return 0;
    case Kind::kString:
      meter.work(v.string().size());
      return count_characters(v.string());
    case Kind::kSequence:
      if (v.sequence().kind == SequenceKind::kIterator) break;
      return v.sequence().items.size();
    case Kind::kDict:
      return v.dict().items.size();
    case Kind::kObject: {
      const Value loops = v.object().attribute("length", meter);
      if (v.object().type() == "LoopContext" && loops.is(Kind::kInt))
        return static_cast<size_t>(loops.integer());
      break;
    }
    default:
      break;
  }
  meter.fail("object of type '{}' has no len()", type_name(v));
}

namespace {

Value no_attribute(const Value& of, const std::string& name) {
  return Value::undefined(text("'{} object' has no attribute '{}'", type_name(of), name));
}

bool is_indexed(const Value& v) {
  return v.is(Kind::kSequence) && v.sequence().kind != SequenceKind::kIterator &&
         v.sequence().kind != SequenceKind::kView;
}

}  // namespace

Value get_attribute(const Value& of, std::string_view name, Meter& meter) {
  require_defined(of, meter);
  if (of.is(Kind::kObject)) return of.object().attribute(name, meter);
  Value method = find_method(of, name, meter);
  if (!method.is(Kind::kNone)) return method;
  if (of.is(Kind::kDict)) {
    if (const Value* found = of.dict().find(name)) return *found;
  }
  return no_attribute(of, std::string(name));
}

Value get_item(const Value& of, const Value& key, Meter& meter) {
  require_defined(of, meter);
  if (of.is(Kind::kDict)) {
    if (const Value* found = of.dict().find(key, meter)) return *found;
  } else if (key.is_integer() && (is_indexed(of) || of.is(Kind::kString))) {
    const auto size = static_cast<int64_t>(length(of, meter));
    int64_t at = key.integer();
    if (at < 0) at += size;
    if (at >= 0 && at < size) {
      if (of.is(Kind::kSequence)) return of.sequence().items[static_cast<size_t>(at)];
      return Value(character_range(of.string(), static_cast<size_t>(at), static_cast<size_t>(at) + 1));
    }
    return Value::undefined(text("{} object has no element {}", type_name(of), key.integer()));
  }
  if (!key.is(Kind::kString)) return no_attribute(of, to_repr(key, meter));
  if (of.is(Kind::kObject)) return of.object().attribute(key.string(), meter);
  const Value method = find_method(of, key.string(), meter);
  return method.is(Kind::kNone) ? no_attribute(of, key.string()) : method;
}

namespace {

// A bound of a slice within [low, high], from the end where it is negative.
int64_t slice_bound(const Value& v, int64_t standard, int64_t size, int64_t low, int64_t high) {
  if (!v.is_integer()) return standard;
  int64_t at = v.integer();
  if (at < 0) at = at < -size ? low : at + size;
  return std::clamp(at, low, high);
}

}  // namespace

Value get_slice(const Value& of, const Slice& slice, Meter& meter) {
  require_defined(of, meter);
  if (!is_indexed(of) && !of.is(Kind::kString)) meter.fail("'{}' object cannot be sliced", type_name(of));
  for (const Value* bound : {&slice.start, &slice.stop, &slice.step}) {
    if (!bound->is_integer() && !bound->is(Kind::kNone)) meter.fail("slice indices must be integers or None");
  }
  const int64_t step = slice.step.is_integer() ? slice.step.integer() : 1;
  if (step == 0) meter.fail("slice step cannot be zero");
  const auto size = static_cast<int64_t>(length(of, meter));
  const bool forward = step > 0;
  const int64_t low = forward ? 0 : -1, high = forward ? size : size - 1;
  const int64_t start = slice_bound(slice.start, forward ? low : high, size, low, high);
  const int64_t stop = slice_bound(slice.stop, forward ? high : low, size, low, high);
  if (of.is(Kind::kString) && step == 1) {
    return make_string(std::string(character_range(of.string(), static_cast<size_t>(start),
                                                   static_cast<size_t>(std::max(start, stop)))),
                       meter);
  }
  std::vector<std::string_view> letters;
  if (of.is(Kind::kString)) {
    meter.work(of.string().size() * sizeof(std::string_view));
    letters = characters(of.string());
  }
  std::string chosen;
  std::vector<Value> items;
  for (int64_t at = start; forward ? at < stop : at > stop;) {
    if (of.is(Kind::kString)) {
      chosen += letters[static_cast<size_t>(at)];
    } else {
      items.push_back(of.sequence().items[static_cast<size_t>(at)]);
    }
    if (__builtin_add_overflow(at, step, &at)) break;
  }
  if (of.is(Kind::kString)) return make_string(std::move(chosen), meter);
  const bool tuple = of.sequence().kind == SequenceKind::kTuple;
  return make_sequence(std::move(items), tuple ? SequenceKind::kTuple : SequenceKind::kList, meter);
}

std::optional<Value> Reader::next(std::string_view name) {
  if (at_ < arguments_.positional.size()) return arguments_.positional[at_++];
  ++at_;
  for (size_t i = 0; i < arguments_.named.size(); ++i) {
    if (arguments_.named[i].first != name || used_[i]) continue;
    used_[i] = true;
    return arguments_.named[i].second;
  }
  return std::nullopt;
}

Value Reader::required(std::string_view name) {
  if (auto v = next(name)) return *v;
  meter_.fail("{}() misses its argument '{}'", function_, name);
}

Value Reader::optional(std::string_view name, Value standard) {
  auto v = next(name);
  return v ? *v : std::move(standard);
}

std::string Reader::string(std::string_view name) {
  const Value v = required(name);
  if (!v.is(Kind::kString)) meter_.fail("{}(): '{}' must be str, not {}", function_, name, type_name(v));
  return v.string();
}

int64_t Reader::integer(std::string_view name, std::optional<int64_t> standard) {
  const std::optional<Value> v = next(name);
  if (!v && standard) return *standard;
  if (!v) meter_.fail("{}() misses its argument '{}'", function_, name);
  if (!v->is_integer()) meter_.fail("{}(): '{}' must be int, not {}", function_, name, type_name(*v));
  return v->integer();
}

bool Reader::flag(std::string_view name, bool standard) {
  const std::optional<Value> v = next(name);
  return v ? truth(*v) : standard;
}

void Reader::finish() {
  if (arguments_.positional.size() > at_) {
    meter_.fail("{}() takes at most {} arguments, {} given", function_, at_, arguments_.positional.size());
  }
  for (size_t i = 0; i < used_.size(); ++i) {
    if (!used_[i])
      meter_.fail("{}() got an unexpected keyword argument '{}'", function_, arguments_.named[i].first);
  }
}

}  // namespace kt::inline texts::jinja
