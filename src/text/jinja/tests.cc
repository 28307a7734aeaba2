// What may follow `is`.
#include <unordered_map>

#include "text/jinja/characters.h"
#include "text/jinja/interpret.h"
#include "text/jinja/operators.h"

namespace kt::inline texts::jinja {

namespace {

using Kinds = bool (*)(const Value&);

// A test of the value alone.
template <Kinds kIs>
bool plain(Interpreter& run, const Value& v, Arguments& arguments) {
  Reader("test", arguments, run.meter()).finish();
  return kIs(v);
}

bool is_defined(const Value& v) { return !v.is(Kind::kUndefined); }
bool is_undefined(const Value& v) { return v.is(Kind::kUndefined); }
bool is_none(const Value& v) { return v.is(Kind::kNone); }
bool is_boolean(const Value& v) { return v.is(Kind::kBool); }
bool is_true(const Value& v) { return v.is(Kind::kBool) && v.boolean(); }
bool is_false(const Value& v) { return v.is(Kind::kBool) && !v.boolean(); }
bool is_whole(const Value& v) { return v.is(Kind::kInt); }
bool is_float(const Value& v) { return v.is(Kind::kFloat); }
bool is_numeric(const Value& v) { return v.is_number(); }
bool is_string(const Value& v) { return v.is(Kind::kString); }
bool is_mapping(const Value& v) { return v.is(Kind::kDict); }
bool is_callable(const Value& v) { return v.is(Kind::kCallable) || v.is(Kind::kUndefined); }
bool is_escaped(const Value&) { return false; }
// Has a length and items.
bool is_sequence(const Value& v) {
  if (v.is(Kind::kSequence)) {
    return v.sequence().kind != SequenceKind::kIterator && v.sequence().kind != SequenceKind::kView;
  }
  return v.is(Kind::kString) || v.is(Kind::kDict) || v.is(Kind::kUndefined);
}

bool divides(Interpreter& run, const Value& v, const Value& by) {
  const Value rest = arithmetic("%", v, by, run.meter());
  return equals(rest, Value(0), run.meter());
}

bool is_odd(Interpreter& run, const Value& v, Arguments& arguments) {
  Reader("odd", arguments, run.meter()).finish();
  return equals(arithmetic("%", v, Value(2), run.meter()), Value(1), run.meter());
}

bool is_even(Interpreter& run, const Value& v, Arguments& arguments) {
  Reader("even", arguments, run.meter()).finish();
  return divides(run, v, Value(2));
}

bool is_divisible(Interpreter& run, const Value& v, Arguments& arguments) {
  Reader in("divisibleby", arguments, run.meter());
  const Value by = in.required("num");
  in.finish();
  return divides(run, v, by);
}

bool is_same(Interpreter& run, const Value& v, Arguments& arguments) {
  Reader in("sameas", arguments, run.meter());
  const Value other = in.required("other");
  in.finish();
  return v.same_as(other);
}

template <int kOp>
bool compares(Interpreter& run, const Value& v, Arguments& arguments) {
  static constexpr std::string_view kOps[] = {"==", "!=", "<", "<=", ">", ">=", "in"};
  Reader in("test", arguments, run.meter());
  const Value other = in.required("other");
  in.finish();
  return compare(kOps[kOp], v, other, run.meter());
}

template <bool kUpper>
bool has_one_case(Interpreter& run, const Value& v, Arguments& arguments) {
  Reader("test", arguments, run.meter()).finish();
  const Value method =
      find_method(Value(to_string(v, run.meter())), kUpper ? "isupper" : "islower", run.meter());
  Arguments none;
  return truth(method.callable().body(run.meter(), none));
}

bool names_filter(Interpreter&, const Value& v, Arguments&) {
  return v.is(Kind::kString) && (find_filter(v.string()) || find_sequence_filter(v.string()));
}

bool names_test(Interpreter&, const Value& v, Arguments&) {
  return v.is(Kind::kString) && find_test(v.string());
}

}  // namespace

Test find_test(std::string_view name) {
  static const std::unordered_map<std::string_view, Test> table{
      {"defined", plain<is_defined>},
      {"undefined", plain<is_undefined>},
      {"none", plain<is_none>},
      {"boolean", plain<is_boolean>},
      {"true", plain<is_true>},
      {"false", plain<is_false>},
      {"integer", plain<is_whole>},
      {"float", plain<is_float>},
      {"number", plain<is_numeric>},
      {"string", plain<is_string>},
      {"mapping", plain<is_mapping>},
      {"sequence", plain<is_sequence>},
      {"iterable", plain<is_iterable>},
      {"callable", plain<is_callable>},
      {"escaped", plain<is_escaped>},
      {"odd", is_odd},
      {"even", is_even},
      {"divisibleby", is_divisible},
      {"sameas", is_same},
      {"lower", has_one_case<false>},
      {"upper", has_one_case<true>},
      {"filter", names_filter},
      {"test", names_test},
      {"eq", compares<0>},
      {"equalto", compares<0>},
      {"==", compares<0>},
      {"ne", compares<1>},
      {"!=", compares<1>},
      {"lt", compares<2>},
      {"lessthan", compares<2>},
      {"<", compares<2>},
      {"le", compares<3>},
      {"<=", compares<3>},
      {"gt", compares<4>},
      {"greaterthan", compares<4>},
      {">", compares<4>},
      {"ge", compares<5>},
      {">=", compares<5>},
      {"in", compares<6>},
  };
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

}  // namespace kt::inline texts::jinja
