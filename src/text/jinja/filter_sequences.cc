// Filters over sequences and dicts.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "text/jinja/characters.h"
#include "text/jinja/interpret.h"
#include "text/jinja/operators.h"

namespace kt::inline texts::jinja {

namespace {

Value fold_case(const Value& v, Meter& meter) {
  return v.is(Kind::kString) ? make_string(lower(v.string()), meter) : v;
}

// "a.b.0" of an item, one part after the other; None gives the item itself. A defined `standard` stands in
// for missing parts.
class Path {
 public:
  Path(const Value& attribute, Value standard, Meter& meter) : standard_(std::move(standard)) {
    if (attribute.is(Kind::kNone)) return;
    if (!attribute.is(Kind::kString)) {
      parts_.push_back(attribute);
      return;
    }
    std::string_view rest = attribute.string();
    while (true) {
      const size_t dot = rest.find('.');
      const std::string_view part = rest.substr(0, dot);
      const bool digits = !part.empty() && part.size() < 18 &&
                          std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; });
      parts_.push_back(digits ? Value(int64_t{std::stoll(std::string(part))}) : Value(part));
      meter.step();
      if (dot == std::string_view::npos) break;
      rest.remove_prefix(dot + 1);
    }
  }

  Value of(Value item, Meter& meter) const {
    for (const Value& part : parts_) {
      meter.step();
      item = get_item(item, part, meter);
      if (item.is(Kind::kUndefined) && !standard_.is(Kind::kNone)) item = standard_;
    }
    return item;
  }

 private:
  std::vector<Value> parts_;
  Value standard_;
};

// The order sorted(keys) would put items in.
std::vector<size_t> sorted_order(const std::vector<Value>& keys, bool reverse, Meter& meter) {
  std::vector<size_t> out(keys.size());
  for (size_t i = 0; i < out.size(); ++i) out[i] = i;
  std::stable_sort(out.begin(), out.end(), [&](size_t a, size_t b) {
    return reverse ? compare("<", keys[b], keys[a], meter) : compare("<", keys[a], keys[b], meter);
  });
  return out;
}

Value sort(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader in("sort", arguments, meter);
  const bool reverse = in.flag("reverse", false), exact = in.flag("case_sensitive", false);
  const Value attribute = in.optional("attribute", None{});
  in.finish();
  std::vector<Path> paths;
  if (attribute.is(Kind::kString)) {
    std::string_view rest = attribute.string();
    for (size_t comma = 0; comma != std::string_view::npos;) {
      comma = rest.find(',');
      paths.emplace_back(Value(rest.substr(0, comma)), None{}, meter);
      rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    }
  } else {
    paths.emplace_back(attribute, None{}, meter);
  }
  const std::vector<Value> items = elements(v, meter);
  std::vector<Value> keys, out;
  for (const Value& item : items) {
    std::vector<Value> key;
    for (const Path& path : paths)
      key.push_back(exact ? path.of(item, meter) : fold_case(path.of(item, meter), meter));
    keys.push_back(make_list(std::move(key), meter));
  }
  for (size_t at : sorted_order(keys, reverse, meter)) out.push_back(items[at]);
  return make_list(std::move(out), meter);
}

Value dictsort(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader in("dictsort", arguments, meter);
  const bool exact = in.flag("case_sensitive", false);
  const std::string by = to_string(in.optional("by", "key"), meter);
  const bool reverse = in.flag("reverse", false);
  in.finish();
  require_defined(v, meter);
  if (by != "key" && by != "value") meter.fail("You can only sort by either \"key\" or \"value\"");
  if (!v.is(Kind::kDict)) meter.fail("'{}' object has no attribute 'items'", type_name(v));
  std::vector<Value> keys, out;
  for (const auto& [key, value] : v.dict().items) {
    const Value& chosen = by == "key" ? key : value;
    keys.push_back(exact ? chosen : fold_case(chosen, meter));
  }
  for (size_t at : sorted_order(keys, reverse, meter)) {
    out.push_back(make_tuple({v.dict().items[at].first, v.dict().items[at].second}, meter));
  }
  return make_list(std::move(out), meter);
}

Value unique(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader in("unique", arguments, meter);
  const bool exact = in.flag("case_sensitive", false);
  const Path path(in.optional("attribute", None{}), None{}, meter);
  in.finish();
  std::unordered_set<std::string> seen_text;
  std::vector<Value> seen, out;
  for (const Value& item : elements(v, meter)) {
    const Value key = exact ? path.of(item, meter) : fold_case(path.of(item, meter), meter);
    if (key.is(Kind::kString)) {
      if (seen_text.insert(key.string()).second) out.push_back(item);
    } else if (std::none_of(seen.begin(), seen.end(),
                            [&](const Value& s) { return equals(s, key, meter); })) {
      require_hashable(key, meter);
      seen.push_back(key);
      out.push_back(item);
    }
  }
  return make_iterator(std::move(out), meter);
}

template <bool kMax>
Value extreme(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader in(kMax ? "max" : "min", arguments, meter);
  const bool exact = in.flag("case_sensitive", false);
  const Path path(in.optional("attribute", None{}), None{}, meter);
  in.finish();
  const std::vector<Value> items = elements(v, meter);
  if (items.empty()) return Value::undefined("No aggregated item, sequence was empty.");
  Value best, best_key;
  for (size_t i = 0; i < items.size(); ++i) {
    const Value key = exact ? path.of(items[i], meter) : fold_case(path.of(items[i], meter), meter);
    if (i && !compare(kMax ? ">" : "<", key, best_key, meter)) continue;
    best = items[i];
    best_key = key;
  }
  return best;
}

Value sum(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader in("sum", arguments, meter);
  const Path path(in.optional("attribute", None{}), None{}, meter);
  Value out = in.optional("start", 0);
  in.finish();
  if (out.is(Kind::kString)) meter.fail("sum() can't sum strings [use ''.join(seq) instead]");
  for (const Value& item : elements(v, meter)) out = arithmetic("+", out, path.of(item, meter), meter);
  return out;
}

Value join(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader in("join", arguments, meter);
  const std::string between = to_string(in.optional("d", ""), meter);
  const Path path(in.optional("attribute", None{}), None{}, meter);
  in.finish();
  std::string out;
  bool first = true;
  for (const Value& item : elements(v, meter)) {
    meter.step();
    if (!first) out += between;
    first = false;
    out += to_string(path.of(item, meter), meter);
    meter.work(between.size());
    meter.fits(out.size());
  }
  return make_string(std::move(out), meter);
}

Value count(Interpreter& run, const Value& v, Arguments& arguments) {
  Reader("length", arguments, run.meter()).finish();
  return length(v, run.meter());
}

Value first(Interpreter& run, const Value& v, Arguments& arguments) {
  Reader("first", arguments, run.meter()).finish();
  if (v.is(Kind::kSequence) && !v.sequence().items.empty()) {
    Sequence& s = v.sequence();
    Value out = s.items.front();
    run.meter().step(s.kind == SequenceKind::kIterator ? static_cast<int64_t>(s.items.size()) : 1);
    if (s.kind == SequenceKind::kIterator) s.items.erase(s.items.begin());
    return out;
  }
  if (v.is(Kind::kString) && !v.string().empty()) return Value(character_range(v.string(), 0, 1));
  const std::vector<Value> items = elements(v, run.meter());
  return items.empty() ? Value::undefined("No first item, sequence was empty.") : items.front();
}

bool is_reversible(const Value& v) {
  return is_iterable(v) && !(v.is(Kind::kSequence) && v.sequence().kind == SequenceKind::kIterator);
}

Value last(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader("last", arguments, meter).finish();
  if (!is_reversible(v)) meter.fail("'{}' object is not reversible", type_name(v));
  if (v.is(Kind::kString) && !v.string().empty()) return get_item(v, Value(-1), meter);
  if (v.is(Kind::kSequence) && !v.sequence().items.empty()) return v.sequence().items.back();
  const std::vector<Value> items = elements(v, meter);
  return items.empty() ? Value::undefined("No last item, sequence was empty.") : items.back();
}

Value reverse(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader("reverse", arguments, meter).finish();
  if (v.is(Kind::kString)) return get_slice(v, {None{}, None{}, Value(-1)}, meter);
  if (!is_iterable(v)) meter.fail("argument must be iterable");
  const bool iterator = !is_reversible(v);
  std::vector<Value> items = elements(v, meter);
  std::reverse(items.begin(), items.end());
  return iterator ? make_list(std::move(items), meter)
                  : make_sequence(std::move(items), SequenceKind::kIterator, meter, "list_reverseiterator");
}

Value to_list(Interpreter& run, const Value& v, Arguments& arguments) {
  Reader("list", arguments, run.meter()).finish();
  return make_list(elements(v, run.meter()), run.meter());
}

Value items(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader("items", arguments, meter).finish();
  std::vector<Value> out;
  if (v.is(Kind::kUndefined)) return make_iterator(std::move(out), meter);
  if (!v.is(Kind::kDict)) meter.fail("Can only get item pairs from a mapping.");
  for (const auto& [key, value] : v.dict().items) out.push_back(make_tuple({key, value}, meter));
  return make_iterator(std::move(out), meter);
}

Value map(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  const Meter::Level level(meter);
  std::vector<Value> out;
  if (!truth(v)) return make_iterator({}, meter);
  if (arguments.positional.empty()) {
    Reader in("map", arguments, meter);
    const Value attribute = in.required("attribute");
    const Path path(attribute, in.optional("default", None{}), meter);
    in.finish();
    for (const Value& item : elements(v, meter)) out.push_back(path.of(item, meter));
    return make_iterator(std::move(out), meter);
  }
  if (!arguments.positional[0].is(Kind::kString)) meter.fail("map requires the name of a filter");
  const std::string name = arguments.positional[0].string();
  Arguments rest{{arguments.positional.begin() + 1, arguments.positional.end()}, arguments.named};
  for (const Value& item : elements(v, meter)) {
    Arguments call = rest;
    out.push_back(run.call_filter(name, item, call));
  }
  return make_iterator(std::move(out), meter);
}

// select, reject and their forms over an attribute.
template <bool kKeep, bool kOfAttribute>
Value choose(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  if (!truth(v)) return make_iterator({}, meter);
  auto& given = arguments.positional;
  if (kOfAttribute && given.empty()) meter.fail("Missing parameter for attribute name");
  const Path path(kOfAttribute ? given[0] : Value(None{}), None{}, meter);
  constexpr size_t kAt = kOfAttribute ? 1 : 0;
  const bool tests = given.size() > kAt;
  if (tests && !given[kAt].is(Kind::kString)) meter.fail("no test named {}", to_repr(given[kAt], meter));
  Arguments rest;
  if (tests) rest = {{given.begin() + kAt + 1, given.end()}, arguments.named};
  std::vector<Value> out;
  for (const Value& item : elements(v, meter)) {
    const Value of = path.of(item, meter);
    Arguments call = rest;
    const bool holds = tests ? run.call_test(given[kAt].string(), of, call) : truth(of);
    meter.step();
    if (holds == kKeep) out.push_back(item);
  }
  return make_iterator(std::move(out), meter);
}

Value batch(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader in("batch", arguments, meter);
  const int64_t width = in.integer("linecount");
  const Value fill = in.optional("fill_with", None{});
  in.finish();
  std::vector<Value> out, row;
  for (const Value& item : elements(v, meter)) {
    if (static_cast<int64_t>(row.size()) == width) out.push_back(make_list(std::exchange(row, {}), meter));
    row.push_back(item);
  }
  while (!row.empty() && !fill.is(Kind::kNone) && static_cast<int64_t>(row.size()) < width) {
    meter.step();
    row.push_back(fill);
  }
  if (!row.empty()) out.push_back(make_list(std::move(row), meter));
  return make_iterator(std::move(out), meter);
}

Value group_by(Interpreter& run, const Value& v, Arguments& arguments) {
  Meter& meter = run.meter();
  Reader in("groupby", arguments, meter);
  const Value attribute = in.required("attribute");
  const Path path(attribute, in.optional("default", None{}), meter);
  const bool exact = in.flag("case_sensitive", false);
  in.finish();
  const std::vector<Value> items = elements(v, meter);
  std::vector<Value> keys, out, group;
  for (const Value& item : items)
    keys.push_back(exact ? path.of(item, meter) : fold_case(path.of(item, meter), meter));
  const std::vector<size_t> order = sorted_order(keys, false, meter);
  for (size_t i = 0; i < order.size(); ++i) {
    group.push_back(items[order[i]]);
    if (i + 1 < order.size() && equals(keys[order[i]], keys[order[i + 1]], meter)) continue;
    Value key = path.of(group.front(), meter);
    out.push_back(make_tuple({std::move(key), make_list(std::exchange(group, {}), meter)}, meter));
  }
  return make_list(std::move(out), meter);
}

}  // namespace

Filter find_sequence_filter(std::string_view name) {
  static const std::unordered_map<std::string_view, Filter> table{
      {"sort", sort},
      {"dictsort", dictsort},
      {"unique", unique},
      {"min", extreme<false>},
      {"max", extreme<true>},
      {"sum", sum},
      {"join", join},
      {"length", count},
      {"count", count},
      {"first", first},
      {"last", last},
      {"reverse", reverse},
      {"list", to_list},
      {"items", items},
      {"map", map},
      {"select", choose<true, false>},
      {"reject", choose<false, false>},
      {"selectattr", choose<true, true>},
      {"rejectattr", choose<false, true>},
      {"batch", batch},
      {"groupby", group_by},
  };
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

}  // namespace kt::inline texts::jinja
