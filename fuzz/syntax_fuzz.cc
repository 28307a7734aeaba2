// Any bytes as an answer in each syntax of calls, whole and cut into pieces: both give the same; and a grammar's words,
// the markers, are likely among the bytes. The first byte chooses the syntax and how the answer begins, the second the
// cuts.
#include <cstdint>
#include <cstdlib>

#include "server/syntax/call_syntax.h"

namespace kt {
namespace {

std::shared_ptr<const ArgumentTypes> types() {
  static const auto made = std::make_shared<const ArgumentTypes>(template_tools(OrderedJson::parse(R"([
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
      "s": {"type": "string"}, "i": {"type": "integer"}, "o": {"type": "object"},
      "u": {"type": ["string", "null", "array"]}, "b": {"type": "boolean"}}}}}])")));
  return made;
}

void require(bool holds) {
  if (!holds) std::abort();
}

void require_single_keys(const std::string& arguments) {
  const auto parsed = nlohmann::ordered_json::parse(arguments, nullptr, false);
  if (parsed.is_discarded()) return;
  size_t keys = 0;
  const auto count = [&](int depth, nlohmann::json::parse_event_t event, const nlohmann::json&) {
    keys += depth == 1 && event == nlohmann::json::parse_event_t::key;
    return true;
  };
  const auto counted = nlohmann::json::parse(arguments, count, false);
  require(!counted.is_discarded() && keys == parsed.size());
}

std::vector<ReplyPiece> read(const ChatSyntax& syntax, const ReplyParser::Start& start, AnswerEnd end,
                             std::string_view text, size_t step) {
  ReplyParser parser(syntax, start);
  std::vector<ReplyPiece> all;
  const auto add = [&](const std::vector<ReplyPiece>& more) {
    for (const ReplyPiece& piece : more) {
      require(!piece.text.empty());
      if (!all.empty() && piece.kind != ReplyPiece::Kind::kCall && all.back().kind == piece.kind &&
          all.back().call == piece.call)
        all.back().text += piece.text;
      else
        all.push_back(piece);
    }
  };
  for (size_t at = 0; at < text.size(); at += step) add(parser.push(text.substr(at, step)));
  add(parser.flush(end));
  int calls = 0;
  for (const ReplyPiece& piece : all) {
    if (piece.kind == ReplyPiece::Kind::kCall) require(piece.call == calls++);
    if (piece.kind == ReplyPiece::Kind::kArguments)
      require(piece.call == calls - 1 && piece.text.find_first_not_of(" \n\r\t") != std::string::npos);
    // No key twice in what tags mean.
    if (piece.kind == ReplyPiece::Kind::kArguments && call_syntax(syntax.tools).form == CallForm::kTags)
      require_single_keys(piece.text);
  }
  require(calls == parser.calls());
  return all;
}

}  // namespace
}  // namespace kt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const kt::ToolSyntax tools = kt::kToolSyntaxes[data[0] % kt::kToolSyntaxes.size()];
  const unsigned bits = data[0] / kt::kToolSyntaxes.size();
  kt::ChatSyntax syntax = kt::with_tool_syntax({}, tools);
  // Thoughts where the syntax has none, none where it has some.
  if ((bits & 1) != 0)
    syntax = kt::with_reasoning(
        syntax, syntax.channels || syntax.frames ? kt::ChatSyntax{} : *kt::reasoning_syntax_named("qwen3"));
  const kt::AnswerEnd end = (bits & 8) != 0 ? kt::AnswerEnd::kCut : kt::AnswerEnd::kStop;
  const kt::ReplyParser::Start start{
      .thinking = (bits & 2) != 0, .tools = (bits & 4) == 0, .types = kt::types()};
  const std::string_view text(reinterpret_cast<const char*>(data) + 2, size - 2);
  const auto whole = kt::read(syntax, start, end, text, text.size() + 1);
  kt::require(kt::read(syntax, start, end, text, 1) == whole);
  kt::require(kt::read(syntax, start, end, text, data[1] % 37 + 2) == whole);
  return 0;
}
