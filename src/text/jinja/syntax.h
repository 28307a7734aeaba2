// A parsed template: trees of expressions and statements, immutable and shared by all renderings.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "text/jinja/value.h"

namespace kt::inline texts::jinja {

struct Expression;
struct Statement;
using ExpressionPtr = std::unique_ptr<Expression>;
using Body = std::vector<std::unique_ptr<Statement>>;

enum class ArgumentKind { kPositional, kNamed, kSpread, kSpreadNamed };  // x, n=x, *x, **x
struct Argument {
  ArgumentKind kind;
  std::string name;
  ExpressionPtr value;
};

enum class ExpressionKind {
  kLiteral,    // literal
  kName,       // name
  kList,       // parts
  kTuple,      // parts
  kDict,       // parts: key, value, key, value ...
  kAttribute,  // parts[0].name
  kItem,       // parts[0][parts[1]]
  kSlice,      // parts[0][parts[1]:parts[2]:parts[3]], each of the three may be null
  kCall,       // parts[0](arguments)
  kFilter,     // parts[0]|name(arguments); parts[0] is null at the start of a filter block
  kTest,       // parts[0] is name(arguments)
  kUnary,      // name parts[0]; name is "-", "+" or "not"
  kBinary,     // parts[0] name parts[1]
  kCompare,    // parts[0] names[0] parts[1] names[1] parts[2] ...
  kAnd,        // parts
  kOr,         // parts
  kConcat,     // parts
  kCondition,  // parts[1] if parts[0] else parts[2], which may be null
};

struct Expression {
  ExpressionKind kind;
  int line;
  int height = 1;  // of the tree; bounded so that walking and freeing it cannot exhaust the stack
  Value literal;
  std::string name;
  std::vector<std::string> names;
  std::vector<ExpressionPtr> parts;
  std::vector<Argument> arguments;
};

// What a value is stored to: a name, an attribute of a namespace, or a tuple of targets.
struct Target {
  std::string name;
  std::string attribute;
  std::vector<Target> tuple;
};

struct Parameter {
  std::string name;
  ExpressionPtr standard;  // may be null
};

enum class StatementKind {
  kText,      // text
  kOutput,    // expressions
  kIf,        // expressions[i] guards bodies[i]; one body more is the else
  kFor,       // target in expressions[0], filtered by expressions[1] (may be null): bodies[0], else bodies[1]
  kSet,       // targets[0] = expressions[0]
  kSetBlock,  // targets[0] = bodies[0], through filter expressions[0] (may be null)
  kMacro,     // text(parameters): bodies[0]
  kCall,      // bodies[0] as caller(parameters) of the call expressions[0]
  kFilter,    // bodies[0] through expressions[0]
  kWith,      // targets[i] = expressions[i] in bodies[0]
  kScope,     // bodies[0] with names of its own
  kBreak,
  kContinue,
};

struct Statement {
  StatementKind kind;
  int line;
  std::string text;
  std::vector<ExpressionPtr> expressions;
  std::vector<Target> targets;
  std::vector<Parameter> parameters;
  std::vector<Body> bodies;
  // Of a macro or a call block: whether its body names these, which is what makes it accept them.
  bool takes_varargs = false, takes_kwargs = false, takes_caller = false;
};

}  // namespace kt::inline texts::jinja
