// Tokens to trees. Statements are in parser.cc, expressions in parse_expression.cc.
#pragma once

#include <string_view>

#include "text/jinja/lexer.h"
#include "text/jinja/syntax.h"

namespace kt::inline texts::jinja {

// The statements of a template. Faults are Errors of the meter, with the line. Tags that would read another
// template (include, import, from, extends, block) are refused by name.
Body parse(std::string_view source, Meter& meter);

class Parser {
 public:
  Parser(std::vector<Token> tokens, Meter& meter) : tokens_(std::move(tokens)), meter_(meter) {}
  Body run();

 private:
  using Names = std::initializer_list<std::string_view>;

  const Token& current() const { return tokens_[at_]; }
  const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token take();
  bool at_operator(std::string_view op) const {
    return current().kind == TokenKind::kOperator && current().text == op;
  }
  bool at_name(std::string_view name) const {
    return current().kind == TokenKind::kName && current().text == name;
  }
  bool skip_operator(std::string_view op);
  bool skip_name(std::string_view name);
  void expect_operator(std::string_view op);
  void expect_name(std::string_view name);
  std::string expect_identifier();
  void expect_block_end();
  [[noreturn]] void unexpected(std::string_view wanted);

  // Statements up to a tag named in `ends`, whose begin and name are taken; which one it was is in end_tag_.
  Body statements(Names ends);
  void statement(Body& out);
  std::unique_ptr<Statement> make(StatementKind kind) const;
  std::unique_ptr<Statement> parse_if();
  std::unique_ptr<Statement> parse_for();
  std::unique_ptr<Statement> parse_set();
  std::unique_ptr<Statement> parse_macro();
  std::unique_ptr<Statement> parse_call();
  std::unique_ptr<Statement> parse_filter_block();
  std::unique_ptr<Statement> parse_with();
  std::unique_ptr<Statement> parse_jump(StatementKind kind);
  void parse_signature(Statement& to);
  void function_body(std::string_view end, Statement& to);
  Target parse_target(bool with_tuple);
  Target parse_one_target();
  void check_target_name(const std::string& name);

  // Expressions, from the loosest binding to the tightest.
  ExpressionPtr parse_tuple(bool with_condition = true);
  bool at_tuple_end() const;
  ExpressionPtr parse_expression() { return parse_condition(); }
  ExpressionPtr parse_condition();
  ExpressionPtr parse_or();
  ExpressionPtr parse_and();
  ExpressionPtr parse_not();
  ExpressionPtr parse_compare();
  ExpressionPtr parse_sum();
  ExpressionPtr parse_concat();
  ExpressionPtr parse_product();
  ExpressionPtr parse_power();
  ExpressionPtr parse_unary(bool with_filter);
  ExpressionPtr parse_primary();
  ExpressionPtr parse_literal();
  ExpressionPtr parse_postfix(ExpressionPtr base);
  ExpressionPtr parse_filters(ExpressionPtr base);
  ExpressionPtr parse_subscript(ExpressionPtr base);
  ExpressionPtr parse_subscribed(ExpressionPtr base);
  ExpressionPtr parse_filter(ExpressionPtr base);
  ExpressionPtr parse_test(ExpressionPtr base);
  std::string dotted_name();
  std::vector<Argument> parse_arguments();
  void add_arguments(Expression& to);
  ExpressionPtr node(ExpressionKind kind, std::string name = {}) const;
  // Adds the part and keeps the height within kMaxNesting.
  void add(Expression& to, ExpressionPtr part) const;
  ExpressionPtr binary(ExpressionPtr left, ExpressionPtr right, std::string op) const;

  std::vector<Token> tokens_;
  Meter& meter_;
  size_t at_ = 0;
  int loops_ = 0;
  std::string end_tag_;
  bool varargs_ = false, kwargs_ = false, caller_ = false;  // named in the macro being read
};

}  // namespace kt::inline texts::jinja
