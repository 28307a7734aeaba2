#include "text/jinja/value.h"

#include <algorithm>
#include <cmath>

#include "text/jinja/characters.h"

namespace kt::inline texts::jinja {

void Meter::fail(std::string_view message) const {
  std::string line_of(message);
  std::replace_if(line_of.begin(), line_of.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
  kt::fail("chat template {} line {}: {}", name_, line, line_of);
}

Value Value::undefined(std::string why) {
  Value v;
  v.held_ = Undefined{std::make_shared<const std::string>(std::move(why))};
  return v;
}

std::string Value::why() const {
  const auto& why = std::get<Undefined>(held_).why;
  return why ? *why : "the value is undefined";
}

bool Value::same_as(const Value& other) const {
  if (kind() != other.kind()) return false;
  switch (kind()) {
    case Kind::kUndefined:
      return std::get<Undefined>(held_).why == std::get<Undefined>(other.held_).why;
    case Kind::kNone:
      return true;
    case Kind::kBool:
      return boolean() == other.boolean();
    case Kind::kInt:
      return integer() == other.integer();
    case Kind::kFloat:
      return number() == other.number();
    case Kind::kString:
      return string() == other.string();  // Python shares equal literals, too
    case Kind::kSequence:
      return &sequence() == &other.sequence();
    case Kind::kDict:
      return &dict() == &other.dict();
    case Kind::kObject:
      return &object() == &other.object();
    case Kind::kCallable:
      return &callable() == &other.callable();
  }
  return false;
}

int Value::depth() const {
  switch (kind()) {
    case Kind::kSequence:
      return sequence().depth;
    case Kind::kDict:
      return dict().depth;
    case Kind::kObject:
      return object().depth;
    case Kind::kCallable:
      return callable().depth;
    default:
      return 0;
  }
}

const Value* Dict::find(std::string_view key) const {
  if (items.size() <= 8) {
    for (const auto& [k, v] : items) {
      if (k.is(Kind::kString) && k.string() == key) return &v;
    }
    return nullptr;
  }
  if (index_.empty()) {
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i].first.is(Kind::kString)) index_.emplace(items[i].first.string(), i);
    }
    index_.emplace(std::string_view(), items.size());  // an index without strings is not made again
  }
  const auto found = index_.find(key);
  return found == index_.end() || found->second == items.size() ? nullptr : &items[found->second].second;
}

const Value* Dict::find(const Value& key, Meter& meter) const {
  if (key.is(Kind::kString)) return find(key.string());
  for (const auto& [k, v] : items) {
    if (!k.is(Kind::kString) && equals(k, key, meter)) return &v;
  }
  return nullptr;
}

namespace {

int deeper(int depth, Meter& meter) {
  if (depth >= kMaxValueDepth) meter.fail("lists nested deeper than {}", kMaxValueDepth);
  return depth + 1;
}

}  // namespace

Value make_sequence(std::vector<Value> items, SequenceKind kind, Meter& meter, std::string label) {
  meter.value(items.size() * sizeof(Value));
  auto out = std::make_shared<Sequence>();
  int depth = 0;
  for (const Value& item : items) depth = std::max(depth, item.depth());
  out->depth = deeper(depth, meter);
  out->kind = kind;
  out->items = std::move(items);
  out->label = std::move(label);
  return out;
}

Value make_dict(std::vector<std::pair<Value, Value>> items, Meter& meter) {
  meter.value(items.size() * 2 * sizeof(Value));
  auto out = std::make_shared<Dict>();
  std::unordered_map<std::string_view, size_t> seen;
  int depth = 0;
  out->items.reserve(items.size());  // `seen` views the strings, which do not move with their holders
  for (auto& [key, value] : items) {
    require_hashable(key, meter);
    depth = std::max({depth, key.depth(), value.depth()});
    if (key.is(Kind::kString)) {
      const auto [at, fresh] = seen.emplace(key.string(), out->items.size());
      if (!fresh) {
        out->items[at->second].second = std::move(value);
        continue;
      }
    } else if (const Value* old = out->find(key, meter)) {
      *const_cast<Value*>(old) = std::move(value);
      continue;
    }
    out->items.emplace_back(std::move(key), std::move(value));
  }
  out->depth = deeper(depth, meter);
  return out;
}

Value make_string(std::string characters, Meter& meter) {
  meter.value(characters.size());
  return Value(std::move(characters));
}

namespace {

Value from_json_at(const nlohmann::ordered_json& json, Meter& meter, int depth) {
  using Type = nlohmann::ordered_json::value_t;
  if (depth > kMaxValueDepth) meter.fail("variables nested deeper than {}", kMaxValueDepth);
  switch (json.type()) {
    case Type::null:
      return None{};
    case Type::boolean:
      return json.get<bool>();
    case Type::number_integer:
      return json.get<int64_t>();
    case Type::number_unsigned:
      if (json.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return json.get<double>();
      return json.get<int64_t>();
    case Type::number_float:
      return json.get<double>();
    case Type::string:
      return make_string(json.get_ref<const std::string&>(), meter);
    case Type::array: {
      std::vector<Value> items;
      for (const auto& item : json) items.push_back(from_json_at(item, meter, depth + 1));
      return make_list(std::move(items), meter);
    }
    case Type::object: {
      std::vector<std::pair<Value, Value>> items;
      for (const auto& [key, item] : json.items()) {
        items.emplace_back(make_string(key, meter), from_json_at(item, meter, depth + 1));
      }
      return make_dict(std::move(items), meter);
    }
    default:
      meter.fail("a variable is neither JSON nor text");
  }
}

}  // namespace

Value from_json(const nlohmann::ordered_json& json, Meter& meter) { return from_json_at(json, meter, 0); }

bool truth(const Value& v) {
  switch (v.kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
      return v.boolean();
    case Kind::kInt:
      return v.integer() != 0;
    case Kind::kFloat:
      return v.number() != 0;
    case Kind::kString:
      return !v.string().empty();
    case Kind::kSequence:
      return v.sequence().kind == SequenceKind::kIterator || !v.sequence().items.empty();
    case Kind::kDict:
      return !v.dict().items.empty();
    case Kind::kObject:
    case Kind::kCallable:
      return true;
  }
  return false;
}

namespace {

bool equal_sequences(const Sequence& a, const Sequence& b, Meter& meter) {
  if (&a == &b) return true;
  if (a.kind != b.kind || a.kind == SequenceKind::kIterator || a.items.size() != b.items.size()) return false;
  if (a.kind == SequenceKind::kView && a.label != b.label) return false;
  return std::equal(a.items.begin(), a.items.end(), b.items.begin(),
                    [&](const Value& x, const Value& y) { return equals(x, y, meter); });
}

bool equal_dicts(const Dict& a, const Dict& b, Meter& meter) {
  if (a.items.size() != b.items.size()) return false;
  for (const auto& [key, value] : a.items) {
    const Value* other = b.find(key, meter);
    if (!other || !equals(value, *other, meter)) return false;
  }
  return true;
}

bool equal_numbers(const Value& a, const Value& b) {
  if (a.is_integer() && b.is_integer()) return a.integer() == b.integer();
  return a.number() == b.number();
}

}  // namespace

bool equals(const Value& a, const Value& b, Meter& meter) {
  meter.step();
  if (a.is_number() && b.is_number()) return equal_numbers(a, b);
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kUndefined:
      return true;
    case Kind::kString:
      meter.work(std::min(a.string().size(), b.string().size()) / 8);
      return a.string() == b.string();
    case Kind::kSequence:
      return equal_sequences(a.sequence(), b.sequence(), meter);
    case Kind::kDict:
      return equal_dicts(a.dict(), b.dict(), meter);
    default:
      return a.same_as(b);
  }
}

std::string to_string(const Value& v, Meter& meter) {
  if (v.is(Kind::kString)) {
    meter.work(v.string().size());
    return v.string();
  }
  if (v.is(Kind::kUndefined)) return {};
  return to_repr(v, meter);
}

namespace {

std::string sequence_repr(const Sequence& s, Meter& meter) {
  if (s.kind == SequenceKind::kRange) return s.label;
  if (s.kind == SequenceKind::kIterator) return "<" + s.label + " object>";
  std::string out = s.kind == SequenceKind::kTuple  ? "("
                    : s.kind == SequenceKind::kView ? s.label + "(["
                                                    : "[";
  for (size_t i = 0; i < s.items.size(); ++i) {
    if (i) out += ", ";
    out += to_repr(s.items[i], meter);
  }
  if (s.kind == SequenceKind::kTuple) return out + (s.items.size() == 1 ? ",)" : ")");
  return out + (s.kind == SequenceKind::kView ? "])" : "]");
}

}  // namespace

std::string to_repr(const Value& v, Meter& meter) {
  const Meter::Level level(meter);
  meter.step();
  std::string out;
  switch (v.kind()) {
    case Kind::kUndefined:
      out = "Undefined";
      break;
    case Kind::kNone:
      out = "None";
      break;
    case Kind::kBool:
      out = v.boolean() ? "True" : "False";
      break;
    case Kind::kInt:
      out = std::to_string(v.integer());
      break;
    case Kind::kFloat:
      out = float_digits(v.number());
      break;
    case Kind::kString:
      out = quote(v.string());
      break;
    case Kind::kSequence:
      out = sequence_repr(v.sequence(), meter);
      break;
    case Kind::kDict: {
      out = "{";
      for (const auto& [key, value] : v.dict().items) {
        if (out.size() > 1) out += ", ";
        out += to_repr(key, meter) + ": " + to_repr(value, meter);
      }
      out += "}";
      break;
    }
    case Kind::kObject:
      out = v.object().repr(meter);
      break;
    case Kind::kCallable:
      out = "<function " + v.callable().name + ">";
      break;
  }
  meter.value(out.size());
  return out;
}

std::string type_name(const Value& v) {
  switch (v.kind()) {
    case Kind::kUndefined:
      return "Undefined";
    case Kind::kNone:
      return "NoneType";
    case Kind::kBool:
      return "bool";
    case Kind::kInt:
      return "int";
    case Kind::kFloat:
      return "float";
    case Kind::kString:
      return "str";
    case Kind::kDict:
      return "dict";
    case Kind::kObject:
      return v.object().type();
    case Kind::kCallable:
      return "function";
    case Kind::kSequence:
      break;
  }
  switch (v.sequence().kind) {
    case SequenceKind::kList:
      return "list";
    case SequenceKind::kTuple:
      return "tuple";
    case SequenceKind::kRange:
      return "range";
    default:
      return v.sequence().label;
  }
}

bool is_iterable(const Value& v) {
  return v.is(Kind::kUndefined) || v.is(Kind::kString) || v.is(Kind::kSequence) || v.is(Kind::kDict);
}

std::vector<Value> elements(const Value& v, Meter& meter) {
  std::vector<Value> out;
  switch (v.kind()) {
    case Kind::kUndefined:
      return out;
    case Kind::kString:
      meter.value(v.string().size() * sizeof(Value));
      meter.step(static_cast<int64_t>(v.string().size()));
      for (std::string_view c : characters(v.string())) out.emplace_back(c);
      return out;
    case Kind::kSequence: {
      Sequence& s = v.sequence();
      meter.value(s.items.size() * sizeof(Value));
      if (s.kind == SequenceKind::kIterator) return std::exchange(s.items, {});
      return s.items;
    }
    case Kind::kDict:
      meter.value(v.dict().items.size() * sizeof(Value));
      for (const auto& [key, value] : v.dict().items) out.push_back(key);
      return out;
    default:
      meter.fail("'{}' object is not iterable", type_name(v));
  }
}

void require_hashable(const Value& key, Meter& meter) {
  const bool list = key.is(Kind::kSequence) && key.sequence().kind == SequenceKind::kList;
  if (list || key.is(Kind::kDict)) meter.fail("unhashable type: '{}'", type_name(key));
  if (key.is(Kind::kSequence) && key.sequence().kind == SequenceKind::kTuple) {
    for (const Value& item : key.sequence().items) require_hashable(item, meter);
  }
}

void require_defined(const Value& v, Meter& meter) {
  if (v.is(Kind::kUndefined)) meter.fail(v.why());
}

}  // namespace kt::inline texts::jinja
