// The value of an expression.
#include "text/jinja/characters.h"
#include "text/jinja/interpret.h"
#include "text/jinja/operators.h"

namespace kt::inline texts::jinja {

Value Interpreter::evaluate(const Expression& e) {
  const Meter::Level level(meter_);
  meter_.step();
  meter_.line = e.line;
  switch (e.kind) {
    case ExpressionKind::kLiteral:
      return e.literal;
    case ExpressionKind::kName:
      return evaluate_name(e);
    case ExpressionKind::kList:
      return make_list(evaluate_all(e.parts), meter_);
    case ExpressionKind::kTuple:
      return make_tuple(evaluate_all(e.parts), meter_);
    case ExpressionKind::kDict:
      return evaluate_dict(e);
    case ExpressionKind::kAttribute:
      return get_attribute(evaluate(*e.parts[0]), e.name, meter_);
    case ExpressionKind::kItem: {
      const Value of = evaluate(*e.parts[0]);
      return get_item(of, evaluate(*e.parts[1]), meter_);
    }
    case ExpressionKind::kSlice:
      return evaluate_slice(e);
    case ExpressionKind::kCall:
      return evaluate_call(e, nullptr);
    case ExpressionKind::kFilter:
      return evaluate_filter(e, nullptr);
    case ExpressionKind::kTest: {
      const Value input = evaluate(*e.parts[0]);
      Arguments arguments = evaluate_arguments(e.arguments);
      return call_test(e.name, input, arguments);
    }
    case ExpressionKind::kUnary: {
      const Value v = evaluate(*e.parts[0]);
      if (e.name == "not") return !truth(v);
      if (e.name == "-") return negate(v, meter_);
      return arithmetic("+", Value(0), v, meter_);
    }
    case ExpressionKind::kBinary: {
      const Value left = evaluate(*e.parts[0]);
      return arithmetic(e.name, left, evaluate(*e.parts[1]), meter_);
    }
    case ExpressionKind::kCompare:
      return evaluate_compare(e);
    case ExpressionKind::kAnd:
    case ExpressionKind::kOr: {
      Value v;
      for (const auto& part : e.parts) {
        v = evaluate(*part);
        if (truth(v) == (e.kind == ExpressionKind::kOr)) return v;
      }
      return v;
    }
    case ExpressionKind::kConcat:
      return evaluate_concat(e);
    case ExpressionKind::kCondition:
      if (truth(evaluate(*e.parts[0]))) return evaluate(*e.parts[1]);
      if (e.parts[2]) return evaluate(*e.parts[2]);
      return Value::undefined("the inline if-expression evaluated to false and no else section was defined");
  }
  return {};
}

Value Interpreter::evaluate_name(const Expression& e) {
  for (const Scope* scope = scope_.get(); scope; scope = scope->parent.get()) {
    if (const auto found = scope->names.find(e.name); found != scope->names.end()) return found->second;
  }
  return Value::undefined("'" + e.name + "' is undefined");
}

std::vector<Value> Interpreter::evaluate_all(const std::vector<ExpressionPtr>& parts) {
  std::vector<Value> out;
  out.reserve(parts.size());
  for (const auto& part : parts) out.push_back(evaluate(*part));
  return out;
}

Value Interpreter::evaluate_dict(const Expression& e) {
  std::vector<std::pair<Value, Value>> out;
  for (size_t i = 0; i < e.parts.size(); i += 2) {
    Value key = evaluate(*e.parts[i]);
    out.emplace_back(std::move(key), evaluate(*e.parts[i + 1]));
  }
  return make_dict(std::move(out), meter_);
}

Value Interpreter::evaluate_slice(const Expression& e) {
  const Value of = evaluate(*e.parts[0]);
  const auto bound = [&](size_t i) { return e.parts[i] ? evaluate(*e.parts[i]) : Value(None{}); };
  Slice slice{bound(1), bound(2), bound(3)};
  return get_slice(of, slice, meter_);
}

Value Interpreter::evaluate_compare(const Expression& e) {
  Value left = evaluate(*e.parts[0]);
  for (size_t i = 0; i < e.names.size(); ++i) {
    Value right = evaluate(*e.parts[i + 1]);
    if (!compare(e.names[i], left, right, meter_)) return false;
    left = std::move(right);
  }
  return true;
}

Value Interpreter::evaluate_concat(const Expression& e) {
  std::string out;
  for (const auto& part : e.parts) {
    out += to_string(evaluate(*part), meter_);
    meter_.fits(out.size());
  }
  return make_string(std::move(out), meter_);
}

Arguments Interpreter::evaluate_arguments(const std::vector<Argument>& list) {
  Arguments out;
  const auto name = [&](const std::string& key, Value value) {
    for (const auto& [other, unused] : out.named) {
      if (other == key) meter_.fail("got multiple values for keyword argument '{}'", key);
    }
    out.named.emplace_back(key, std::move(value));
  };
  for (const Argument& argument : list) {
    Value v = evaluate(*argument.value);
    switch (argument.kind) {
      case ArgumentKind::kPositional:
        out.positional.push_back(std::move(v));
        break;
      case ArgumentKind::kNamed:
        name(argument.name, std::move(v));
        break;
      case ArgumentKind::kSpread:
        for (Value& item : elements(v, meter_)) out.positional.push_back(std::move(item));
        break;
      case ArgumentKind::kSpreadNamed:
        if (!v.is(Kind::kDict)) meter_.fail("argument after ** must be a mapping, not {}", type_name(v));
        if (v.dict().items.size() > 256) meter_.fail("more than 256 keyword arguments");
        for (const auto& [key, value] : v.dict().items) {
          if (!key.is(Kind::kString)) meter_.fail("keywords must be strings");
          name(key.string(), value);
        }
    }
  }
  return out;
}

Value Interpreter::evaluate_call(const Expression& e, const Value* caller) {
  const Value callee = evaluate(*e.parts[0]);
  Arguments arguments = evaluate_arguments(e.arguments);
  if (caller) arguments.named.emplace_back("caller", *caller);
  meter_.line = e.line;
  require_defined(callee, meter_);
  if (!callee.is(Kind::kCallable)) meter_.fail("'{}' object is not callable", type_name(callee));
  return callee.callable().body(meter_, arguments);
}

// `input` stands in for the missing innermost part of a filter block's chain.
Value Interpreter::evaluate_filter(const Expression& e, const Value* input) {
  if (e.kind != ExpressionKind::kFilter) return evaluate(e);
  const Meter::Level level(meter_);
  Value of = !e.parts[0] ? (input ? *input : Value())
             : input     ? evaluate_filter(*e.parts[0], input)
                         : evaluate(*e.parts[0]);
  Arguments arguments = evaluate_arguments(e.arguments);
  meter_.line = e.line;
  return call_filter(e.name, of, arguments);
}

Value Interpreter::call_filter(const std::string& name, const Value& input, Arguments& arguments) {
  meter_.step();
  Filter filter = find_filter(name);
  if (!filter) filter = find_sequence_filter(name);
  if (!filter) meter_.fail("no filter named '{}'", name);
  return filter(*this, input, arguments);
}

bool Interpreter::call_test(const std::string& name, const Value& input, Arguments& arguments) {
  meter_.step();
  const Test test = find_test(name);
  if (!test) meter_.fail("no test named '{}'", name);
  return test(*this, input, arguments);
}

}  // namespace kt::inline texts::jinja
