// Reads answers as the server does, for tests/syntaxes_test.py. A case is a line of JSON, {"template": ..., "tools":
// [...], "text": ...}, with "syntax", the name of a parser, instead of what the template shows; so is the answer:
// {"syntax", "thinks", "pieces": [[kind, call, text, id], ...], "cut_off", "differs": how many ways of cutting the text
// in two, or into bytes, gave something else}, or {"error"}.
#include <iostream>

#include "base/error.h"
#include "server/syntax/chat_syntax.h"

namespace kt::inline server {
namespace {

const Tokenizer& no_words() {
  static const Tokenizer made(TokenizerParts{.name = "probe", .tokens = {"a"}});
  return made;
}

struct Read {
  OrderedJson pieces = OrderedJson::array();
  bool cut_off = false;
};

Read read(const ChatSyntax& syntax, const ReplyParser::Start& start,
          const std::vector<std::string_view>& parts) {
  ReplyParser parser(syntax, start);
  std::vector<ReplyPiece> all;
  const auto add = [&](const std::vector<ReplyPiece>& more) {
    for (const ReplyPiece& piece : more)
      if (!all.empty() && piece.kind != ReplyPiece::Kind::kCall && all.back().kind == piece.kind &&
          all.back().call == piece.call)
        all.back().text += piece.text;
      else
        all.push_back(piece);
  };
  for (const std::string_view part : parts) add(parser.push(part));
  add(parser.flush());
  constexpr std::array kKinds = {"reasoning", "content", "call", "arguments"};
  Read out{.cut_off = parser.cut_off()};
  for (const ReplyPiece& piece : all)
    out.pieces.push_back({kKinds[static_cast<size_t>(piece.kind)], piece.call, piece.text, piece.id});
  return out;
}

OrderedJson answer(const OrderedJson& input) {
  const std::string source = input.value("template", "");
  ChatSyntax syntax = chat_syntax_of(source, no_words());
  if (input.contains("syntax"))
    syntax = with_tool_syntax(syntax, tool_syntax_named(input["syntax"].get<std::string>()).value());
  const OrderedJson tools = template_tools(input.value("tools", OrderedJson::array()));
  const ReplyParser::Start start{.thinking = input.value("thinking", false),
                                 .tools = !tools.empty(),
                                 .types = std::make_shared<const ArgumentTypes>(tools)};
  const std::string& text = input["text"].get_ref<const std::string&>();
  const Read whole = read(syntax, start, {text});
  int differs = 0;
  std::vector<std::string_view> bytes;
  for (size_t at = 0; at < text.size(); ++at) {
    const std::string_view view = text;
    differs += read(syntax, start, {view.substr(0, at), view.substr(at)}).pieces != whole.pieces;
    bytes.push_back(view.substr(at, 1));
  }
  differs += read(syntax, start, bytes).pieces != whole.pieces;
  return {{"syntax", name_of(syntax.tools)},
          {"thinks", syntax.think_begin},
          {"pieces", whole.pieces},
          {"cut_off", whole.cut_off},
          {"differs", differs}};
}

}  // namespace
}  // namespace kt::inline server

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    kt::OrderedJson out;
    try {
      out = kt::answer(kt::OrderedJson::parse(line));
    } catch (const std::exception& error) {
      out = {{"error", error.what()}};
    }
    std::cout << out.dump(-1, ' ', false, kt::OrderedJson::error_handler_t::replace) << std::endl;
  }
}
