// The values a template computes with, with Python's meaning. Immutable but for namespaces, so that copies
// share. Nothing here reaches outside: there are no attributes but the ones listed in methods.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "text/jinja/meter.h"

namespace kt::inline texts::jinja {

class Value;
struct Sequence;
struct Dict;
struct Object;
struct Callable;

enum class Kind {
  kUndefined,
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kSequence,
  kDict,
  kObject,
  kCallable,
};

struct None {};
// `why` is the message of the error that using it gives: "'x' is undefined".
struct Undefined {
  std::shared_ptr<const std::string> why;
};

class Value {
 public:
  Value() = default;  // undefined
  Value(None) : held_(None{}) {}
  Value(bool v) : held_(v) {}
  Value(int64_t v) : held_(v) {}
  Value(int v) : held_(int64_t{v}) {}
  Value(size_t v) : held_(static_cast<int64_t>(v)) {}
  Value(double v) : held_(v) {}
  Value(std::string v) : held_(std::make_shared<const std::string>(std::move(v))) {}
  Value(std::string_view v) : Value(std::string(v)) {}
  Value(const char* v) : Value(std::string(v)) {}
  Value(std::shared_ptr<Sequence> v) : held_(std::move(v)) {}
  Value(std::shared_ptr<Dict> v) : held_(std::move(v)) {}
  Value(std::shared_ptr<Object> v) : held_(std::move(v)) {}
  Value(std::shared_ptr<Callable> v) : held_(std::move(v)) {}
  static Value undefined(std::string why);

  Kind kind() const { return static_cast<Kind>(held_.index()); }
  bool is(Kind k) const { return kind() == k; }
  bool is_number() const { return kind() >= Kind::kBool && kind() <= Kind::kFloat; }
  bool is_integer() const { return is(Kind::kBool) || is(Kind::kInt); }  // bool is an int, as in Python

  // Each requires its kind.
  bool boolean() const { return std::get<bool>(held_); }
  int64_t integer() const { return is(Kind::kBool) ? boolean() : std::get<int64_t>(held_); }
  double number() const {
    return is(Kind::kFloat) ? std::get<double>(held_) : static_cast<double>(integer());
  }
  const std::string& string() const { return *std::get<std::shared_ptr<const std::string>>(held_); }
  Sequence& sequence() const { return *std::get<std::shared_ptr<Sequence>>(held_); }
  const Dict& dict() const { return *std::get<std::shared_ptr<Dict>>(held_); }
  Object& object() const { return *std::get<std::shared_ptr<Object>>(held_); }
  const Callable& callable() const { return *std::get<std::shared_ptr<Callable>>(held_); }
  std::shared_ptr<Object> shared_object() const { return std::get<std::shared_ptr<Object>>(held_); }
  std::string why() const;  // of an undefined

  // The same value in memory (Python's `is`).
  bool same_as(const Value& other) const;
  int depth() const;  // 0 for scalars

 private:
  std::variant<Undefined, None, bool, int64_t, double, std::shared_ptr<const std::string>,
               std::shared_ptr<Sequence>, std::shared_ptr<Dict>, std::shared_ptr<Object>,
               std::shared_ptr<Callable>>
      held_;
};

// What runs of values Python tells apart. An iterator is emptied by the first who reads it.
enum class SequenceKind { kList, kTuple, kRange, kView, kIterator };

struct Sequence {
  SequenceKind kind = SequenceKind::kList;
  std::vector<Value> items;
  int depth = 1;
  std::string label;  // how a range prints; "dict_items" of a view; "generator" of an iterator
};

// In insertion order; keys are unique under Python's ==.
struct Dict {
  std::vector<std::pair<Value, Value>> items;
  int depth = 1;

  const Value* find(std::string_view key) const;
  const Value* find(const Value& key, Meter& meter) const;

 private:
  mutable std::unordered_map<std::string_view, size_t> index_;  // made at the first look into a large one
};

// Things with attributes and an identity: namespaces, loops.
struct Object {
  virtual ~Object() = default;
  virtual Value attribute(std::string_view name, Meter& meter) const = 0;
  // NOLINTNEXTLINE(performance-unnecessary-value-param): those that have attributes keep it.
  virtual bool set_attribute(const std::string&, Value) { return false; }
  virtual std::string repr(Meter&) const = 0;
  virtual std::string type() const = 0;
  virtual void release() {}  // lets go of what it holds
  int depth = 0;
};

// Evaluated arguments of a call.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

struct Callable {
  std::string name;
  std::function<Value(Meter&, Arguments&)> body;
  int depth = 0;
};

// Making values; each charges the meter and refuses depths past kMaxValueDepth.
Value make_sequence(std::vector<Value> items, SequenceKind kind, Meter& meter, std::string label = {});
inline Value make_list(std::vector<Value> items, Meter& meter) {
  return make_sequence(std::move(items), SequenceKind::kList, meter);
}
inline Value make_tuple(std::vector<Value> items, Meter& meter) {
  return make_sequence(std::move(items), SequenceKind::kTuple, meter);
}
inline Value make_iterator(std::vector<Value> items, Meter& meter) {
  return make_sequence(std::move(items), SequenceKind::kIterator, meter, "generator");
}
// A later pair replaces the value of an equal earlier key. Keys have to be hashable.
Value make_dict(std::vector<std::pair<Value, Value>> items, Meter& meter);
Value make_string(std::string characters, Meter& meter);
Value from_json(const nlohmann::ordered_json& json, Meter& meter);

bool truth(const Value& v);
bool equals(const Value& a, const Value& b, Meter& meter);
// What str() and repr() give.
std::string to_string(const Value& v, Meter& meter);
std::string to_repr(const Value& v, Meter& meter);
// "str", "NoneType", for messages.
std::string type_name(const Value& v);

// The elements a loop would see; an Error where the value is not iterable. Empties iterators.
std::vector<Value> elements(const Value& v, Meter& meter);
bool is_iterable(const Value& v);
// Error "unhashable type: 'list'" for what cannot be a key.
void require_hashable(const Value& key, Meter& meter);
// Error "'x' is undefined" for what cannot be used.
void require_defined(const Value& v, Meter& meter);

}  // namespace kt::inline texts::jinja
