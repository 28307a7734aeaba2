#include "text/jinja/parser.h"

#include <algorithm>

#include "text/jinja/characters.h"

namespace kt::inline texts::jinja {

Body parse(std::string_view source, Meter& meter) { return Parser(tokenize(source, meter), meter).run(); }

Token Parser::take() {
  Token token = std::move(tokens_[at_]);
  if (at_ + 1 < tokens_.size()) {
    ++at_;
  } else {
    tokens_[at_] = token;  // the end stays
  }
  meter_.line = current().line;
  return token;
}

bool Parser::skip_operator(std::string_view op) {
  if (!at_operator(op)) return false;
  take();
  return true;
}

bool Parser::skip_name(std::string_view name) {
  if (!at_name(name)) return false;
  take();
  return true;
}

void Parser::expect_operator(std::string_view op) {
  if (!skip_operator(op)) unexpected(op);
}

void Parser::expect_name(std::string_view name) {
  if (!skip_name(name)) unexpected(name);
}

std::string Parser::expect_identifier() {
  if (current().kind != TokenKind::kName) unexpected("a name");
  return take().text;
}

void Parser::expect_block_end() {
  if (current().kind != TokenKind::kBlockEnd) unexpected("end of statement block");
  take();
}

void Parser::unexpected(std::string_view wanted) {
  switch (current().kind) {
    case TokenKind::kEnd:
      meter_.fail("unexpected end of template, expected {}", wanted);
    case TokenKind::kBlockEnd:
    case TokenKind::kVariableEnd:
      meter_.fail("unexpected end of the tag, expected {}", wanted);
    default:
      meter_.fail("expected {}, got {}", wanted, quote(current().text));
  }
}

Body Parser::run() {
  Body out = statements({});
  return out;
}

Body Parser::statements(Names ends) {
  const Meter::Level level(meter_);
  Body out;
  while (true) {
    switch (current().kind) {
      case TokenKind::kEnd:
        if (ends.size()) meter_.fail("unexpected end of template, expected {}", *(ends.end() - 1));
        return out;
      case TokenKind::kText:
        out.push_back(make(StatementKind::kText));
        out.back()->text = take().text;
        break;
      case TokenKind::kVariableBegin: {
        take();
        out.push_back(make(StatementKind::kOutput));
        out.back()->expressions.push_back(parse_tuple());
        if (current().kind != TokenKind::kVariableEnd) unexpected("end of print statement");
        take();
        break;
      }
      default: {
        take();  // the begin of a block
        if (current().kind == TokenKind::kName &&
            std::find(ends.begin(), ends.end(), current().text) != ends.end()) {
          end_tag_ = take().text;
          return out;
        }
        statement(out);
      }
    }
  }
}

std::unique_ptr<Statement> Parser::make(StatementKind kind) const {
  auto out = std::make_unique<Statement>();
  out->kind = kind;
  out->line = current().line;
  return out;
}

void Parser::statement(Body& out) {
  if (current().kind != TokenKind::kName) meter_.fail("tag name expected");
  const std::string tag = take().text;
  if (tag == "if") {
    out.push_back(parse_if());
  } else if (tag == "for") {
    out.push_back(parse_for());
  } else if (tag == "set") {
    out.push_back(parse_set());
  } else if (tag == "macro") {
    out.push_back(parse_macro());
  } else if (tag == "call") {
    out.push_back(parse_call());
  } else if (tag == "filter") {
    out.push_back(parse_filter_block());
  } else if (tag == "with") {
    out.push_back(parse_with());
  } else if (tag == "break") {
    out.push_back(parse_jump(StatementKind::kBreak));
  } else if (tag == "continue") {
    out.push_back(parse_jump(StatementKind::kContinue));
  } else if (tag == "print") {
    out.push_back(make(StatementKind::kOutput));
    out.back()->expressions.push_back(parse_expression());
    while (skip_operator(",")) out.back()->expressions.push_back(parse_expression());
    expect_block_end();
  } else if (tag == "generation") {  // marks the assistant's part for training; the text is the same
    auto scope = make(StatementKind::kScope);
    expect_block_end();
    function_body("endgeneration", *scope);
    out.push_back(std::move(scope));
  } else {
    for (std::string_view refused :
         {"include", "import", "from", "extends", "block", "autoescape", "do", "trans"}) {
      if (tag == refused) meter_.fail("tag '{}' is not supported in chat templates", tag);
    }
    meter_.fail("encountered unknown tag {}", quote(tag));
  }
}

std::unique_ptr<Statement> Parser::parse_if() {
  auto out = make(StatementKind::kIf);
  while (true) {
    out->expressions.push_back(parse_tuple(false));
    expect_block_end();
    out->bodies.push_back(statements({"elif", "else", "endif"}));
    if (end_tag_ == "elif") continue;
    if (end_tag_ == "else") {
      expect_block_end();
      out->bodies.push_back(statements({"endif"}));
    }
    expect_block_end();
    return out;
  }
}

std::unique_ptr<Statement> Parser::parse_for() {
  auto out = make(StatementKind::kFor);
  out->targets.push_back(parse_target(true));
  expect_name("in");
  out->expressions.push_back(parse_tuple(false));
  out->expressions.push_back(skip_name("if") ? parse_expression() : nullptr);
  if (at_name("recursive")) meter_.fail("recursive loops are not supported");
  expect_block_end();
  ++loops_;
  out->bodies.push_back(statements({"endfor", "else"}));
  --loops_;
  if (end_tag_ == "else") {
    expect_block_end();
    out->bodies.push_back(statements({"endfor"}));
  }
  expect_block_end();
  return out;
}

void Parser::check_target_name(const std::string& name) {
  for (std::string_view constant : {"true", "false", "none", "True", "False", "None"}) {
    if (name == constant) meter_.fail("can't assign to {}", quote(name));
  }
}

Target Parser::parse_one_target() {
  Target out;
  if (skip_operator("(")) {
    out = parse_target(true);
    expect_operator(")");
    return out;
  }
  out.name = expect_identifier();
  check_target_name(out.name);
  if (skip_operator(".")) out.attribute = expect_identifier();
  return out;
}

Target Parser::parse_target(bool with_tuple) {
  const Meter::Level level(meter_);
  Target first = parse_one_target();
  if (!with_tuple || !at_operator(",")) return first;
  Target out;
  out.tuple.push_back(std::move(first));
  while (skip_operator(",")) {
    if (current().kind != TokenKind::kName && !at_operator("(")) break;
    if (at_name("in")) break;
    out.tuple.push_back(parse_one_target());
  }
  return out;
}

std::unique_ptr<Statement> Parser::parse_set() {
  auto out = make(StatementKind::kSet);
  out->targets.push_back(parse_target(true));
  if (skip_operator("=")) {
    out->expressions.push_back(parse_tuple());
    expect_block_end();
    return out;
  }
  out->kind = StatementKind::kSetBlock;
  out->expressions.push_back(at_operator("|") ? parse_filters(nullptr) : nullptr);
  expect_block_end();
  out->bodies.push_back(statements({"endset"}));
  expect_block_end();
  return out;
}

void Parser::parse_signature(Statement& to) {
  expect_operator("(");
  while (!at_operator(")")) {
    if (!to.parameters.empty()) expect_operator(",");
    if (at_operator(")")) break;
    Parameter parameter{expect_identifier(), nullptr};
    check_target_name(parameter.name);
    for (const Parameter& other : to.parameters) {
      if (other.name == parameter.name) meter_.fail("duplicate argument {}", quote(parameter.name));
    }
    if (skip_operator("=")) {
      parameter.standard = parse_expression();
    } else if (!to.parameters.empty() && to.parameters.back().standard) {
      meter_.fail("non-default argument follows default argument");
    }
    to.parameters.push_back(std::move(parameter));
  }
  expect_operator(")");
}

// A body that is a function of its own: loops outside cannot be left from it.
void Parser::function_body(std::string_view end, Statement& to) {
  const int loops = std::exchange(loops_, 0);
  const bool varargs = std::exchange(varargs_, false), kwargs = std::exchange(kwargs_, false),
             caller = std::exchange(caller_, false);
  to.bodies.push_back(statements({end}));
  to.takes_varargs = varargs_;
  to.takes_kwargs = kwargs_;
  to.takes_caller = caller_;
  varargs_ |= varargs;
  kwargs_ |= kwargs;
  caller_ |= caller;
  loops_ = loops;
  expect_block_end();
}

std::unique_ptr<Statement> Parser::parse_macro() {
  auto out = make(StatementKind::kMacro);
  out->text = expect_identifier();
  check_target_name(out->text);
  parse_signature(*out);
  expect_block_end();
  function_body("endmacro", *out);
  return out;
}

std::unique_ptr<Statement> Parser::parse_call() {
  auto out = make(StatementKind::kCall);
  if (at_operator("(")) parse_signature(*out);
  out->expressions.push_back(parse_expression());
  if (out->expressions[0]->kind != ExpressionKind::kCall) meter_.fail("expected call");
  expect_block_end();
  function_body("endcall", *out);
  return out;
}

std::unique_ptr<Statement> Parser::parse_filter_block() {
  auto out = make(StatementKind::kFilter);
  out->expressions.push_back(parse_filter(nullptr));
  while (at_operator("|")) {
    take();
    out->expressions.back() = parse_filter(std::move(out->expressions.back()));
  }
  expect_block_end();
  out->bodies.push_back(statements({"endfilter"}));
  expect_block_end();
  return out;
}

std::unique_ptr<Statement> Parser::parse_with() {
  auto out = make(StatementKind::kWith);
  while (current().kind != TokenKind::kBlockEnd) {
    if (!out->targets.empty()) expect_operator(",");
    out->targets.push_back(parse_target(false));
    expect_operator("=");
    out->expressions.push_back(parse_expression());
  }
  expect_block_end();
  out->bodies.push_back(statements({"endwith"}));
  expect_block_end();
  return out;
}

std::unique_ptr<Statement> Parser::parse_jump(StatementKind kind) {
  if (!loops_) meter_.fail("'{}' outside loop", kind == StatementKind::kBreak ? "break" : "continue");
  auto out = make(kind);
  expect_block_end();
  return out;
}

}  // namespace kt::inline texts::jinja
