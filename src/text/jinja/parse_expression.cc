#include <algorithm>
#include <charconv>

#include "text/jinja/characters.h"
#include "text/jinja/parser.h"

namespace kt::inline texts::jinja {

ExpressionPtr Parser::node(ExpressionKind kind, std::string name) const {
  auto out = std::make_unique<Expression>();
  out->kind = kind;
  out->line = current().line;
  out->name = std::move(name);
  return out;
}

void Parser::add(Expression& to, ExpressionPtr part) const {
  if (part) to.height = std::max(to.height, part->height + 1);
  if (to.height > kMaxNesting) meter_.fail("an expression nested deeper than {}", kMaxNesting);
  to.parts.push_back(std::move(part));
}

ExpressionPtr Parser::binary(ExpressionPtr left, ExpressionPtr right, std::string op) const {
  auto out = node(ExpressionKind::kBinary, std::move(op));
  out->line = left->line;
  add(*out, std::move(left));
  add(*out, std::move(right));
  return out;
}

bool Parser::at_tuple_end() const {
  return current().kind == TokenKind::kVariableEnd || current().kind == TokenKind::kBlockEnd ||
         at_operator(")");
}

// One expression, or several with commas between them as a tuple.
ExpressionPtr Parser::parse_tuple(bool with_condition) {
  const auto one = [&] { return with_condition ? parse_condition() : parse_or(); };
  if (at_tuple_end()) unexpected("an expression");
  ExpressionPtr first = one();
  if (!at_operator(",")) return first;
  auto out = node(ExpressionKind::kTuple);
  add(*out, std::move(first));
  while (skip_operator(",")) {
    if (at_tuple_end()) break;
    add(*out, one());
  }
  return out;
}

ExpressionPtr Parser::parse_condition() {
  const Meter::Level level(meter_);
  ExpressionPtr out = parse_or();
  while (skip_name("if")) {
    auto condition = node(ExpressionKind::kCondition);
    add(*condition, parse_or());
    add(*condition, std::move(out));
    add(*condition, skip_name("else") ? parse_condition() : nullptr);
    out = std::move(condition);
  }
  return out;
}

ExpressionPtr Parser::parse_or() {
  ExpressionPtr first = parse_and();
  if (!at_name("or")) return first;
  auto out = node(ExpressionKind::kOr);
  add(*out, std::move(first));
  while (skip_name("or")) add(*out, parse_and());
  return out;
}

ExpressionPtr Parser::parse_and() {
  ExpressionPtr first = parse_not();
  if (!at_name("and")) return first;
  auto out = node(ExpressionKind::kAnd);
  add(*out, std::move(first));
  while (skip_name("and")) add(*out, parse_not());
  return out;
}

ExpressionPtr Parser::parse_not() {
  const Meter::Level level(meter_);
  if (!at_name("not")) return parse_compare();
  auto out = node(ExpressionKind::kUnary, "not");
  take();
  add(*out, parse_not());
  return out;
}

ExpressionPtr Parser::parse_compare() {
  ExpressionPtr first = parse_sum();
  ExpressionPtr out;
  while (true) {
    std::string op;
    for (std::string_view known : {"==", "!=", "<", "<=", ">", ">="}) {
      if (at_operator(known)) op = known;
    }
    if (at_name("in")) op = "in";
    const bool negated = at_name("not") && ahead().kind == TokenKind::kName && ahead().text == "in";
    if (negated) op = "not in";
    if (op.empty()) return out ? std::move(out) : std::move(first);
    take();
    if (negated) take();
    if (!out) {
      out = node(ExpressionKind::kCompare);
      add(*out, std::move(first));
    }
    out->names.push_back(op);
    add(*out, parse_sum());
  }
}

ExpressionPtr Parser::parse_sum() {
  ExpressionPtr out = parse_concat();
  while (at_operator("+") || at_operator("-")) {
    std::string op = take().text;
    out = binary(std::move(out), parse_concat(), std::move(op));
  }
  return out;
}

ExpressionPtr Parser::parse_concat() {
  ExpressionPtr first = parse_product();
  if (!at_operator("~")) return first;
  auto out = node(ExpressionKind::kConcat);
  add(*out, std::move(first));
  while (skip_operator("~")) add(*out, parse_product());
  return out;
}

ExpressionPtr Parser::parse_product() {
  ExpressionPtr out = parse_power();
  while (at_operator("*") || at_operator("/") || at_operator("//") || at_operator("%")) {
    std::string op = take().text;
    out = binary(std::move(out), parse_power(), std::move(op));
  }
  return out;
}

ExpressionPtr Parser::parse_power() {
  ExpressionPtr out = parse_unary(true);
  while (skip_operator("**")) out = binary(std::move(out), parse_unary(true), "**");
  return out;
}

ExpressionPtr Parser::parse_unary(bool with_filter) {
  const Meter::Level level(meter_);
  ExpressionPtr out;
  if (at_operator("-") || at_operator("+")) {
    out = node(ExpressionKind::kUnary, current().text);
    take();
    add(*out, parse_unary(false));
  } else {
    out = parse_primary();
  }
  out = parse_postfix(std::move(out));
  return with_filter ? parse_filters(std::move(out)) : std::move(out);
}

ExpressionPtr Parser::parse_literal() {
  auto out = node(ExpressionKind::kLiteral);
  const TokenKind kind = current().kind;
  std::string all = take().text;
  if (kind == TokenKind::kString) {
    while (current().kind == TokenKind::kString) all += take().text;  // neighbours are one literal
    out->literal = Value(std::move(all));
    return out;
  }
  if (kind == TokenKind::kInteger) {
    int64_t v = 0;
    const auto end = std::from_chars(all.data(), all.data() + all.size(), v);
    if (end.ec != std::errc() || end.ptr != all.data() + all.size())
      meter_.fail("number {} is out of range", all);
    out->literal = Value(v);
    return out;
  }
  double v = 0;
  const auto end = std::from_chars(all.data(), all.data() + all.size(), v);
  if (end.ec != std::errc()) meter_.fail("number {} is out of range", all);
  out->literal = Value(v);
  return out;
}

ExpressionPtr Parser::parse_primary() {
  const Token& token = current();
  if (token.kind == TokenKind::kString || token.kind == TokenKind::kInteger ||
      token.kind == TokenKind::kFloat) {
    return parse_literal();
  }
  if (token.kind == TokenKind::kName) {
    auto out = node(ExpressionKind::kName, token.text);
    const std::string& name = out->name;
    if (name == "true" || name == "True" || name == "false" || name == "False") {
      out->kind = ExpressionKind::kLiteral;
      out->literal = Value((name[0] | 32) == 't');
    } else if (name == "none" || name == "None") {
      out->kind = ExpressionKind::kLiteral;
      out->literal = None{};
    }
    varargs_ |= name == "varargs";
    kwargs_ |= name == "kwargs";
    caller_ |= name == "caller";
    take();
    return out;
  }
  if (skip_operator("(")) {
    if (at_operator(")")) {
      take();
      return node(ExpressionKind::kTuple);
    }
    ExpressionPtr out = parse_tuple();
    expect_operator(")");
    return out;
  }
  const bool list = at_operator("[");
  if (!list && !at_operator("{")) unexpected("an expression");
  const std::string_view close = list ? "]" : "}";
  auto out = node(list ? ExpressionKind::kList : ExpressionKind::kDict);
  take();
  while (!at_operator(close)) {
    if (!out->parts.empty()) expect_operator(",");
    if (at_operator(close)) break;
    add(*out, parse_expression());
    if (list) continue;
    expect_operator(":");
    add(*out, parse_expression());
  }
  expect_operator(close);
  return out;
}

ExpressionPtr Parser::parse_postfix(ExpressionPtr base) {
  while (true) {
    if (at_operator(".") || at_operator("[")) {
      base = parse_subscript(std::move(base));
    } else if (at_operator("(")) {
      auto out = node(ExpressionKind::kCall);
      add(*out, std::move(base));
      add_arguments(*out);
      base = std::move(out);
    } else {
      return base;
    }
  }
}

ExpressionPtr Parser::parse_filters(ExpressionPtr base) {
  while (true) {
    if (skip_operator("|")) {
      base = parse_filter(std::move(base));
    } else if (at_name("is")) {
      base = parse_test(std::move(base));
    } else if (at_operator("(")) {
      auto out = node(ExpressionKind::kCall);
      add(*out, std::move(base));
      add_arguments(*out);
      base = std::move(out);
    } else {
      return base;
    }
  }
}

ExpressionPtr Parser::parse_subscript(ExpressionPtr base) {
  if (skip_operator("[")) return parse_subscribed(std::move(base));
  expect_operator(".");
  if (current().kind == TokenKind::kName) {
    auto out = node(ExpressionKind::kAttribute, current().text);
    take();
    add(*out, std::move(base));
    return out;
  }
  if (current().kind != TokenKind::kInteger) unexpected("name or number");
  auto out = node(ExpressionKind::kItem);
  add(*out, std::move(base));
  add(*out, parse_literal());
  return out;
}

ExpressionPtr Parser::parse_subscribed(ExpressionPtr base) {
  auto out = node(ExpressionKind::kItem);
  add(*out, std::move(base));
  const auto at_end = [&] { return at_operator(":") || at_operator("]") || at_operator(","); };
  add(*out, at_operator(":") ? nullptr : parse_expression());
  if (skip_operator(":")) {
    out->kind = ExpressionKind::kSlice;
    add(*out, at_end() ? nullptr : parse_expression());
    add(*out, skip_operator(":") && !at_end() ? parse_expression() : nullptr);
  } else if (at_operator(",")) {  // x[1, 2] asks for a tuple
    auto tuple = node(ExpressionKind::kTuple);
    add(*tuple, std::move(out->parts.back()));
    out->parts.pop_back();
    while (skip_operator(",")) add(*tuple, parse_expression());
    add(*out, std::move(tuple));
  }
  expect_operator("]");
  return out;
}

std::string Parser::dotted_name() {
  std::string out = expect_identifier();
  while (skip_operator(".")) out += "." + expect_identifier();
  return out;
}

ExpressionPtr Parser::parse_filter(ExpressionPtr base) {
  auto out = node(ExpressionKind::kFilter);
  out->name = dotted_name();
  add(*out, std::move(base));
  if (at_operator("(")) add_arguments(*out);
  return out;
}

ExpressionPtr Parser::parse_test(ExpressionPtr base) {
  take();  // is
  const bool negated = skip_name("not");
  auto out = node(ExpressionKind::kTest);
  out->name = dotted_name();
  add(*out, std::move(base));
  const TokenKind kind = current().kind;
  const bool starts_value = kind == TokenKind::kName || kind == TokenKind::kString ||
                            kind == TokenKind::kInteger || kind == TokenKind::kFloat || at_operator("[") ||
                            at_operator("{");
  if (at_operator("(")) {
    add_arguments(*out);
  } else if (starts_value && !at_name("else") && !at_name("or") && !at_name("and")) {
    if (at_name("is")) meter_.fail("you cannot chain multiple tests with is");
    ExpressionPtr value = parse_postfix(parse_primary());
    out->height = std::max(out->height, value->height + 1);
    out->arguments.push_back({ArgumentKind::kPositional, {}, std::move(value)});
  }
  if (!negated) return out;
  auto inverse = node(ExpressionKind::kUnary, "not");
  add(*inverse, std::move(out));
  return inverse;
}

void Parser::add_arguments(Expression& to) {
  to.arguments = parse_arguments();
  for (const Argument& argument : to.arguments) to.height = std::max(to.height, argument.value->height + 1);
  if (to.height > kMaxNesting) meter_.fail("an expression nested deeper than {}", kMaxNesting);
}

std::vector<Argument> Parser::parse_arguments() {
  std::vector<Argument> out;
  expect_operator("(");
  bool named = false, spread = false;
  while (!at_operator(")")) {
    if (!out.empty()) {
      expect_operator(",");
      if (at_operator(")")) break;
    }
    Argument argument{ArgumentKind::kPositional, {}, nullptr};
    if (skip_operator("**")) {
      argument.kind = ArgumentKind::kSpreadNamed;
      named = true;
    } else if (skip_operator("*")) {
      if (spread || named) meter_.fail("invalid syntax for function call expression");
      argument.kind = ArgumentKind::kSpread;
      spread = true;
    } else if (current().kind == TokenKind::kName && ahead().kind == TokenKind::kOperator &&
               ahead().text == "=") {
      argument.kind = ArgumentKind::kNamed;
      argument.name = take().text;
      take();
      named = true;
    } else if (named || spread) {
      meter_.fail("invalid syntax for function call expression");
    }
    argument.value = parse_expression();
    out.push_back(std::move(argument));
  }
  expect_operator(")");
  return out;
}

}  // namespace kt::inline texts::jinja
