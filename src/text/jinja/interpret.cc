#include "text/jinja/interpret.h"

#include <algorithm>

#include "text/jinja/characters.h"
#include "text/jinja/operators.h"

namespace kt::inline texts::jinja {

Interpreter::Interpreter(const Value& variables, Meter& meter, Clock clock)
    : meter_(meter), clock_(std::move(clock)), scope_(std::make_shared<Scope>()) {
  define_globals();
  for (const auto& [key, value] : variables.dict().items) define(key.string(), value);
  scope_ = inner();
}

Interpreter::~Interpreter() {
  for (const auto& scope : captured_) scope->names.clear();
  for (const auto& object : namespaces_) object->release();
}

std::string Interpreter::run(const Body& body) {
  std::string out;
  out_ = &out;
  execute(body);
  return out;
}

std::shared_ptr<Scope> Interpreter::inner() const {
  auto out = std::make_shared<Scope>();
  out->parent = scope_;
  return out;
}

void Interpreter::write_text(std::string_view characters) {
  meter_.work(characters.size());
  if (characters.size() > meter_.budget().output_bytes - out_->size()) {
    meter_.fail("output larger than {}", human_bytes(meter_.budget().output_bytes));
  }
  out_->append(characters);
}

void Interpreter::write(const Value& v) {
  if (v.is(Kind::kString)) return write_text(v.string());
  write_text(to_string(v, meter_));
}

std::string Interpreter::capture(const Body& body) {
  std::string out;
  std::string* const outer = std::exchange(out_, &out);
  const std::shared_ptr<Scope> scope = std::exchange(scope_, inner());
  execute(body);
  scope_ = scope;
  out_ = outer;
  meter_.fits(out.size());
  return out;
}

Interpreter::Flow Interpreter::execute(const Body& body) {
  const Meter::Level level(meter_);
  for (const auto& statement : body) {
    meter_.line = statement->line;
    meter_.step();
    if (const Flow flow = execute_one(*statement); flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::execute_one(const Statement& s) {
  switch (s.kind) {
    case StatementKind::kText:
      write_text(s.text);
      break;
    case StatementKind::kOutput:
      for (const auto& e : s.expressions) write(evaluate(*e));
      break;
    case StatementKind::kIf:
      return execute_if(s);
    case StatementKind::kFor:
      return execute_for(s);
    case StatementKind::kSet:
      assign(s.targets[0], evaluate(*s.expressions[0]));
      break;
    case StatementKind::kSetBlock:
      execute_set(s);
      break;
    case StatementKind::kMacro:
      define(s.text, make_macro(s, s.text));
      break;
    case StatementKind::kCall:
      execute_call(s);
      break;
    case StatementKind::kFilter:
      execute_filter(s);
      break;
    case StatementKind::kWith:
      return execute_with(s);
    case StatementKind::kScope: {
      const std::shared_ptr<Scope> scope = std::exchange(scope_, inner());
      execute(s.bodies[0]);
      scope_ = scope;
      break;
    }
    case StatementKind::kBreak:
      return Flow::kBreak;
    case StatementKind::kContinue:
      return Flow::kContinue;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::execute_if(const Statement& s) {
  for (size_t i = 0; i < s.bodies.size(); ++i) {
    if (i == s.expressions.size() || truth(evaluate(*s.expressions[i]))) return execute(s.bodies[i]);
  }
  return Flow::kNext;
}

namespace {

// `loop` inside a for.
struct Loop : Object, std::enable_shared_from_this<Loop> {
  std::vector<Value> items;
  size_t at = 0;

  Loop(std::vector<Value> of, Meter& meter) : items(std::move(of)) {
    for (const Value& item : items) depth = std::max(depth, item.depth());
    if (++depth > kMaxValueDepth) meter.fail("lists nested deeper than {}", kMaxValueDepth);
  }
  std::string type() const override { return "LoopContext"; }
  std::string repr(Meter&) const override { return text("<LoopContext {}/{}>", at + 1, items.size()); }
  Value attribute(std::string_view name, Meter&) const override {
    if (name == "index") return at + 1;
    if (name == "index0") return at;
    if (name == "first") return at == 0;
    if (name == "last") return at + 1 == items.size();
    if (name == "length") return items.size();
    if (name == "revindex") return items.size() - at;
    if (name == "revindex0") return items.size() - at - 1;
    if (name == "previtem") return at ? items[at - 1] : Value::undefined("there is no previous item");
    if (name == "nextitem")
      return at + 1 < items.size() ? items[at + 1] : Value::undefined("there is no next item");
    if (name == "cycle") {
      auto out = std::make_shared<Callable>();
      out->name = "cycle";
      out->depth = depth;
      out->body = [self = shared_from_this()](Meter& meter, Arguments& arguments) {
        if (arguments.positional.empty()) meter.fail("no items for cycling given");
        return arguments.positional[self->at % arguments.positional.size()];
      };
      return out;
    }
    return Value::undefined(text("'loop object' has no attribute '{}'", name));
  }
};

}  // namespace

Interpreter::Flow Interpreter::execute_for(const Statement& s) {
  std::vector<Value> items = elements(evaluate(*s.expressions[0]), meter_);
  const std::shared_ptr<Scope> outer = scope_;
  if (s.expressions[1]) {
    std::vector<Value> kept;
    for (Value& item : items) {
      meter_.step();
      scope_ = outer;
      scope_ = inner();
      assign(s.targets[0], item);
      if (truth(evaluate(*s.expressions[1]))) kept.push_back(std::move(item));
    }
    items = std::move(kept);
    scope_ = outer;
  }
  if (items.empty()) {
    if (s.bodies.size() < 2) return Flow::kNext;
    scope_ = inner();
    const Flow flow = execute(s.bodies[1]);
    scope_ = outer;
    return flow;
  }
  auto loop = std::make_shared<Loop>(std::move(items), meter_);
  const Value loop_value{std::shared_ptr<Object>(loop)};
  std::shared_ptr<Scope> scope;
  for (; loop->at < loop->items.size(); ++loop->at) {
    meter_.step();
    meter_.line = s.line;
    scope_ = outer;
    if (scope && !scope->captured && scope.use_count() == 1) {
      scope->names.clear();
    } else {
      scope = inner();
    }
    scope_ = scope;
    assign(s.targets[0], loop->items[loop->at]);
    define("loop", loop_value);
    const Flow flow = execute(s.bodies[0]);
    scope_ = outer;
    if (flow == Flow::kBreak) break;
  }
  return Flow::kNext;
}

void Interpreter::assign(const Target& target, const Value& value) {
  if (!target.tuple.empty()) {
    require_defined(value, meter_);
    const std::vector<Value> items = elements(value, meter_);
    if (items.size() != target.tuple.size()) {
      meter_.fail("expected {} values to unpack, got {}", target.tuple.size(), items.size());
    }
    for (size_t i = 0; i < items.size(); ++i) assign(target.tuple[i], items[i]);
  } else if (target.attribute.empty()) {
    define(target.name, value);
  } else {
    Value holder;
    for (Scope* s = scope_.get(); s; s = s->parent.get()) {
      if (const auto found = s->names.find(target.name); found != s->names.end()) {
        holder = found->second;
        break;
      }
    }
    if (!holder.is(Kind::kObject) || !holder.object().set_attribute(target.attribute, value)) {
      meter_.fail("cannot assign attribute on non-namespace object '{}'", target.name);
    }
  }
}

void Interpreter::execute_set(const Statement& s) {
  Value value = make_string(capture(s.bodies[0]), meter_);
  if (s.expressions[0]) value = evaluate_filter(*s.expressions[0], &value);
  assign(s.targets[0], value);
}

void Interpreter::execute_filter(const Statement& s) {
  const Value value = make_string(capture(s.bodies[0]), meter_);
  write(evaluate_filter(*s.expressions[0], &value));
}

Interpreter::Flow Interpreter::execute_with(const Statement& s) {
  const std::vector<Value> values = evaluate_all(s.expressions);
  const std::shared_ptr<Scope> outer = std::exchange(scope_, inner());
  for (size_t i = 0; i < values.size(); ++i) assign(s.targets[i], values[i]);
  const Flow flow = execute(s.bodies[0]);
  scope_ = outer;
  return flow;
}

void Interpreter::execute_call(const Statement& s) {
  const Value caller = make_macro(s, "caller");
  write(evaluate_call(*s.expressions[0], &caller));
}

Value Interpreter::make_macro(const Statement& s, const std::string& name) {
  for (std::shared_ptr<Scope> scope = scope_; scope && !scope->captured; scope = scope->parent) {
    scope->captured = true;
    captured_.push_back(scope);
  }
  auto out = std::make_shared<Callable>();
  out->name = name;
  out->body = [this, &s, name, scope = scope_](Meter&, Arguments& arguments) {
    return call_macro(s, name, scope, arguments);
  };
  return out;
}

Value Interpreter::call_macro(const Statement& s, const std::string& name,
                              const std::shared_ptr<Scope>& scope, Arguments& arguments) {
  const Meter::Level level(meter_);
  const size_t count = s.parameters.size(), given = arguments.positional.size();
  if (given > count && !s.takes_varargs) {
    meter_.fail("macro '{}' takes not more than {} argument(s)", name, count);
  }
  const int line = meter_.line;
  const std::shared_ptr<Scope> outer = std::exchange(scope_, scope);
  scope_ = inner();
  std::vector<bool> bound(count);
  for (size_t i = 0; i < std::min(given, count); ++i) {
    define(s.parameters[i].name, arguments.positional[i]);
    bound[i] = true;
  }
  std::vector<std::pair<Value, Value>> rest;
  Value caller = Value::undefined("No caller defined");
  for (auto& [key, value] : arguments.named) {
    const auto known = std::find_if(s.parameters.begin(), s.parameters.end(),
                                    [&](const Parameter& p) { return p.name == key; });
    const auto at = static_cast<size_t>(known - s.parameters.begin());
    if (at < count) {
      if (bound[at]) meter_.fail("macro '{}' got multiple values for argument '{}'", name, key);
      define(key, value);
      bound[at] = true;
    } else if (key == "caller" && s.takes_caller) {
      caller = value;
    } else if (s.takes_kwargs) {
      rest.emplace_back(key, value);
    } else {
      meter_.fail("macro '{}' takes no keyword argument '{}'", name, key);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    if (bound[i]) continue;
    const Parameter& p = s.parameters[i];
    define(p.name, p.standard ? evaluate(*p.standard)
                              : Value::undefined(text("parameter '{}' was not provided", p.name)));
  }
  if (s.takes_caller) define("caller", caller);
  if (s.takes_kwargs) define("kwargs", make_dict(std::move(rest), meter_));
  if (s.takes_varargs) {
    const auto first = arguments.positional.begin() + static_cast<std::ptrdiff_t>(std::min(given, count));
    define("varargs", make_tuple({first, arguments.positional.end()}, meter_));
  }
  const Value out = make_string(capture(s.bodies[0]), meter_);
  scope_ = outer;
  meter_.line = line;
  return out;
}

}  // namespace kt::inline texts::jinja
