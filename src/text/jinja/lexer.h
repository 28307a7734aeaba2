// The source of a template as tokens. White space around tags is settled here (trim_blocks and lstrip_blocks
// are on, as where chat templates are published; "-" and "+" overrule), so the parser sees text that is
// output as it stands.
#pragma once

#include <string>
#include <vector>

#include "text/jinja/meter.h"

namespace kt::inline texts::jinja {

enum class TokenKind {
  kText,
  kBlockBegin,
  kBlockEnd,
  kVariableBegin,
  kVariableEnd,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenKind kind;
  int line;
  std::string text;  // of a string: its value, escapes resolved
};

// Ends with a kEnd token. Faults are Errors of the meter, with the line.
std::vector<Token> tokenize(std::string_view source, Meter& meter);

}  // namespace kt::inline texts::jinja
