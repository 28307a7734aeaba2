// --tool-call-parser and --reasoning-parser: the names of syntaxes (server/syntax/parser_names.cc) as the command line
// sees them.
#pragma once
#include <CLI/CLI.hpp>
#include <string>

#include "server/syntax/chat_syntax.h"

namespace kt::inline cli {

struct ParserFlags {
  std::string tools, reasoning;  // empty: by the template

  void add_options(CLI::App& verb);
  // What the template shows, but for what the flags say. Where both say something and differ, a line on stderr tells
  // that the flag counts. Error with the nearest name for a name that is none.
  ChatSyntax syntax(const std::string& chat_template, const Tokenizer& tokenizer) const;
};

}  // namespace kt::inline cli
