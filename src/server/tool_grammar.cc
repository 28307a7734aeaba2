// tool_call_grammar: what an answer that must call tools may be.
#include "base/error.h"
#include "server/chat_syntax.h"

namespace kt {
namespace {

struct Writer {
  const ChatSyntax& syntax;
  const Tokenizer& tokenizer;
  ToolMarkers markers;

  // Markers that are tokens come as tokens: spelled out in pieces they mean nothing to the model.
  Grammar marker(std::string_view spelled) const;
  Grammar thought(ReplyParser::Start start) const;
  Grammar call(const std::string& name, Grammar arguments) const;
  Grammar all(Grammar call, const ToolChoice& choice) const;
};

Grammar nothing() { return literal_grammar(""); }
Grammar line_breaks(int most) { return repeat_grammar(literal_grammar("\n"), 0, most); }

Grammar Writer::marker(std::string_view spelled) const {
  if (const auto id = tokenizer.id_of(spelled)) return token_grammar(*id);
  return literal_grammar(std::string(spelled));
}

Grammar Writer::thought(ReplyParser::Start start) const {
  if (syntax.think_end.empty()) return nothing();
  const auto id = tokenizer.id_of(syntax.think_end);
  Grammar rest = id && tokenizer.is_special(*id)
                     ? sequence_grammar({text_without_grammar(""), token_grammar(*id)})
                     : until_grammar(syntax.think_end);
  rest = sequence_grammar({std::move(rest), line_breaks(2)});
  if (start.thinking) return rest;
  return choice_grammar({sequence_grammar({marker(syntax.think_begin), std::move(rest)}), nothing()});
}

Grammar Writer::call(const std::string& name, Grammar arguments) const {
  if (syntax.tools == ToolSyntax::kHermes) {
    const std::string head = "\n{\"name\": " + OrderedJson(name).dump() + ", \"arguments\": ";
    return sequence_grammar({marker(markers.call_begin), literal_grammar(head), std::move(arguments),
                             literal_grammar("}\n"), marker(markers.call_end)});
  }
  if (syntax.tools == ToolSyntax::kDeepSeekV31)
    return sequence_grammar({marker(markers.call_begin), literal_grammar(name), marker(markers.separator),
                             std::move(arguments), marker(markers.call_end)});
  return sequence_grammar({marker(markers.call_begin), literal_grammar("function"), marker(markers.separator),
                           literal_grammar(name + "\n```json\n"), std::move(arguments),
                           literal_grammar("\n```"), marker(markers.call_end)});
}

Grammar Writer::all(Grammar call, const ToolChoice& choice) const {
  const bool lines = syntax.tools != ToolSyntax::kDeepSeekV31;
  std::vector<Grammar> parts;
  if (!markers.section_begin.empty()) parts.push_back(marker(markers.section_begin));
  parts.push_back(call);
  if (choice.parallel)
    parts.push_back(repeat_grammar(lines ? sequence_grammar({literal_grammar("\n"), call}) : call, 0, -1));
  if (!markers.section_end.empty()) parts.push_back(marker(markers.section_end));
  return sequence_grammar(std::move(parts));
}

Grammar arguments_grammar(const OrderedJson& function, size_t index) {
  const OrderedJson& schema = function["parameters"];
  if (schema.empty()) return json_object_grammar();
  try {
    return json_schema_grammar(schema);
  } catch (const Error& error) {
    fail_as(error.kind(), "tools[{}].function.parameters: {}", index, error.what());
  }
}

}  // namespace

Grammar after_thought_grammar(const ChatSyntax& syntax, const Tokenizer& tokenizer, Grammar answer) {
  const Writer writer{.syntax = syntax, .tokenizer = tokenizer, .markers = tool_markers(syntax.tools)};
  return sequence_grammar({writer.thought({.thinking = true}), std::move(answer)});
}

Grammar tool_call_grammar(const ChatSyntax& syntax, const Tokenizer& tokenizer, const OrderedJson& tools,
                          const ToolChoice& choice, ReplyParser::Start start) {
  if (syntax.tools == ToolSyntax::kNone) fail("tool_choice: this model has no syntax for calls that we know");
  const Writer writer{.syntax = syntax, .tokenizer = tokenizer, .markers = tool_markers(syntax.tools)};
  std::vector<Grammar> calls;
  constexpr size_t kMostStates = 300'000;  // as of one schema
  size_t states = 0;
  for (size_t i = 0; i < tools.size(); ++i) {
    const OrderedJson& function = tools[i]["function"];
    const std::string& name = function["name"].get_ref<const std::string&>();
    if (!choice.name.empty() && choice.name != name) continue;
    calls.push_back(writer.call(name, arguments_grammar(function, i)));
    if ((states += grammar_size(calls.back())) > kMostStates)
      fail("tools: their schemas are too large together; tools[{}] is the first too many", i);
  }
  if (calls.empty()) fail("tool_choice: no function \"{}\" among the tools", choice.name);
  Grammar call = calls.size() == 1 ? calls[0] : choice_grammar(std::move(calls));
  return sequence_grammar({writer.thought(start), writer.all(std::move(call), choice)});
}

}  // namespace kt
