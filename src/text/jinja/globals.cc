// The functions a template finds without being given them.
#include <ctime>
#include <map>

#include "text/jinja/characters.h"
#include "text/jinja/interpret.h"
#include "text/jinja/operators.h"

namespace kt::inline texts::jinja {

namespace {

struct Namespace : Object {
  std::map<std::string, Value, std::less<>> values;

  std::string type() const override { return "Namespace"; }
  std::string repr(Meter& meter) const override {
    std::string out = "<Namespace {";
    for (const auto& [key, value] : values) {
      if (out.back() != '{') out += ", ";
      out += quote(key) + ": " + to_repr(value, meter);
    }
    return out + "}>";
  }
  Value attribute(std::string_view name, Meter&) const override {
    const auto found = values.find(name);
    if (found != values.end()) return found->second;
    return Value::undefined(text("'namespace object' has no attribute '{}'", name));
  }
  bool set_attribute(const std::string& name, Value value) override {
    values[name] = std::move(value);
    return true;
  }
  void release() override { values.clear(); }
};

struct Cycler : Object, std::enable_shared_from_this<Cycler> {
  std::vector<Value> items;
  mutable size_t at = 0;

  std::string type() const override { return "Cycler"; }
  std::string repr(Meter&) const override { return "<Cycler>"; }
  Value attribute(std::string_view name, Meter&) const override {
    if (name == "current") return items[at];
    if (name != "next" && name != "reset")
      return Value::undefined(text("'cycler object' has no attribute '{}'", name));
    auto out = std::make_shared<Callable>();
    out->name = name;
    out->depth = depth;
    out->body = [self = shared_from_this(), next = name == "next"](Meter&, Arguments&) -> Value {
      if (!next) {
        self->at = 0;
        return None{};
      }
      const size_t was = std::exchange(self->at, (self->at + 1) % self->items.size());
      return self->items[was];
    };
    return out;
  }
};

Value function(std::string name, std::function<Value(Meter&, Arguments&)> body) {
  auto out = std::make_shared<Callable>();
  out->name = std::move(name);
  out->body = std::move(body);
  return out;
}

Value range(Meter& meter, Arguments& arguments) {
  for (const Value& v : arguments.positional) {
    require_defined(v, meter);
    if (!v.is_integer()) meter.fail("range(): '{}' object cannot be interpreted as an integer", type_name(v));
  }
  const auto& given = arguments.positional;
  if (given.empty() || given.size() > 3 || !arguments.named.empty())
    meter.fail("range() takes 1 to 3 integers");
  const int64_t start = given.size() > 1 ? given[0].integer() : 0;
  const int64_t stop = given.size() > 1 ? given[1].integer() : given[0].integer();
  const int64_t step = given.size() > 2 ? given[2].integer() : 1;
  if (step == 0) meter.fail("range() arg 3 must not be zero");
  std::vector<Value> out;
  for (int64_t at = start; step > 0 ? at < stop : at > stop;) {
    if (static_cast<int64_t>(out.size()) >= meter.budget().range) {
      meter.fail("range() of more than {} elements", meter.budget().range);
    }
    out.emplace_back(at);
    if (__builtin_add_overflow(at, step, &at)) break;
  }
  meter.step(static_cast<int64_t>(out.size() / 4));
  std::string label = text("range({}, {}", start, stop) + (step == 1 ? ")" : text(", {})", step));
  return make_sequence(std::move(out), SequenceKind::kRange, meter, std::move(label));
}

// The pairs of dict(...): a mapping or pairs, then keywords.
std::vector<std::pair<Value, Value>> pairs(Meter& meter, Arguments& arguments) {
  std::vector<std::pair<Value, Value>> out;
  if (arguments.positional.size() > 1)
    meter.fail("dict expected at most 1 argument, got {}", arguments.positional.size());
  if (!arguments.positional.empty()) {
    const Value& from = arguments.positional[0];
    if (from.is(Kind::kDict)) {
      out = from.dict().items;
    } else {
      for (const Value& item : elements(from, meter)) {
        const std::vector<Value> two = elements(item, meter);
        if (two.size() != 2)
          meter.fail("dictionary update sequence element has length {}; 2 is required", two.size());
        out.emplace_back(two[0], two[1]);
      }
    }
  }
  for (auto& [key, value] : arguments.named) out.emplace_back(key, value);
  return out;
}

std::string local_time(std::time_t now, const std::string& pattern, Meter& meter) {
  std::tm parts{};
  localtime_r(&now, &parts);
  char out[2048];
  const std::string marked = pattern + "|";  // an empty result is told from one that does not fit
  const size_t size = std::strftime(out, sizeof out, marked.c_str(), &parts);
  if (size == 0) meter.fail("strftime_now: the result of a format of {} bytes is too long", pattern.size());
  return std::string(out, size - 1);
}

Value make_cycler(Meter& meter, Arguments& arguments) {
  if (arguments.positional.empty()) meter.fail("at least one item has to be provided");
  auto out = std::make_shared<Cycler>();
  out->items = arguments.positional;
  for (const Value& item : out->items) out->depth = std::max(out->depth, item.depth());
  if (++out->depth > kMaxValueDepth) meter.fail("lists nested deeper than {}", kMaxValueDepth);
  return std::shared_ptr<Object>(out);
}

Value make_joiner(Meter& meter, Arguments& arguments) {
  Reader in("joiner", arguments, meter);
  const Value between = in.optional("sep", ", ");
  in.finish();
  auto used = std::make_shared<bool>(false);
  Value out = function("joiner", [used, between](Meter&, Arguments&) -> Value {
    return std::exchange(*used, true) ? between : Value("");
  });
  return out;
}

}  // namespace

Value Interpreter::make_namespace(Arguments& arguments) {
  auto out = std::make_shared<Namespace>();
  for (auto& [key, value] : pairs(meter_, arguments)) out->values[to_string(key, meter_)] = value;
  namespaces_.push_back(out);
  return std::shared_ptr<Object>(out);
}

void Interpreter::define_globals() {
  define("range", function("range", range));
  define("dict", function("dict", [](Meter& meter, Arguments& arguments) {
           return make_dict(pairs(meter, arguments), meter);
         }));
  define("namespace",
         function("namespace", [this](Meter&, Arguments& arguments) { return make_namespace(arguments); }));
  define("cycler", function("cycler", make_cycler));
  define("joiner", function("joiner", make_joiner));
  define("raise_exception", function("raise_exception", [](Meter& meter, Arguments& arguments) -> Value {
           Reader in("raise_exception", arguments, meter);
           const Value message = in.required("message");
           in.finish();
           meter.fail(to_string(message, meter));
         }));
  define("strftime_now", function("strftime_now", [this](Meter& meter, Arguments& arguments) {
           Reader in("strftime_now", arguments, meter);
           const std::string pattern = in.string("format");
           in.finish();
           return make_string(local_time(clock_(), pattern, meter), meter);
         }));
}

}  // namespace kt::inline texts::jinja
