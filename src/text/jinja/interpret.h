// Runs a parsed template over variables. One Interpreter is one rendering; it is not shared between threads.
#pragma once

#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "text/jinja/syntax.h"

namespace kt::inline texts::jinja {

// Names visible to a stretch of template. Macros keep the scope they were written in.
struct Scope {
  std::unordered_map<std::string, Value> names;
  std::shared_ptr<Scope> parent;
  bool captured = false;
};

class Interpreter {
 public:
  using Clock = std::function<std::time_t()>;

  Interpreter(const Value& variables, Meter& meter, Clock clock);
  ~Interpreter();
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  std::string run(const Body& body);

  Meter& meter() { return meter_; }
  Value call_filter(const std::string& name, const Value& input, Arguments& arguments);
  bool call_test(const std::string& name, const Value& input, Arguments& arguments);

 private:
  enum class Flow { kNext, kBreak, kContinue };

  Flow execute(const Body& body);
  Flow execute_one(const Statement& s);
  Flow execute_if(const Statement& s);
  Flow execute_for(const Statement& s);
  void execute_set(const Statement& s);
  void execute_filter(const Statement& s);
  Flow execute_with(const Statement& s);
  void execute_call(const Statement& s);
  void write(const Value& v);
  void write_text(std::string_view characters);
  // What `body` writes, as a string, in a scope of its own.
  std::string capture(const Body& body);

  Value evaluate(const Expression& e);
  Value evaluate_name(const Expression& e);
  Value evaluate_slice(const Expression& e);
  Value evaluate_call(const Expression& e, const Value* caller);
  Value evaluate_filter(const Expression& e, const Value* input);
  Value evaluate_compare(const Expression& e);
  Value evaluate_concat(const Expression& e);
  Value evaluate_dict(const Expression& e);
  std::vector<Value> evaluate_all(const std::vector<ExpressionPtr>& parts);
  Arguments evaluate_arguments(const std::vector<Argument>& list);

  Value make_macro(const Statement& s, const std::string& name);
  Value call_macro(const Statement& s, const std::string& name, const std::shared_ptr<Scope>& scope,
                   Arguments& arguments);
  void assign(const Target& target, const Value& value);
  void define(const std::string& name, Value value) { scope_->names[name] = std::move(value); }
  void define_globals();
  std::shared_ptr<Scope> inner() const;
  Value make_namespace(Arguments& arguments);

  Meter& meter_;
  Clock clock_;
  std::shared_ptr<Scope> scope_;
  std::string* out_ = nullptr;
  // Held to be emptied at the end: both may be part of a ring of owners.
  std::vector<std::shared_ptr<Scope>> captured_;
  std::vector<std::shared_ptr<Object>> namespaces_;
};

// The tables of filters.cc and tests.cc; null where there is no such name.
using Filter = Value (*)(Interpreter& run, const Value& input, Arguments& arguments);
using Test = bool (*)(Interpreter& run, const Value& input, Arguments& arguments);
Filter find_filter(std::string_view name);
Filter find_sequence_filter(std::string_view name);
Test find_test(std::string_view name);

}  // namespace kt::inline texts::jinja
