// tool_call_grammar: what an answer that must call tools may be; answer_grammar: and what any other is wrapped in.
#include "base/error.h"
#include "server/syntax/call_grammar.h"

namespace kt::inline server {
namespace {

Grammar nothing() { return literal_grammar(""); }
Grammar line_breaks(int most) { return repeat_grammar(literal_grammar("\n"), 0, most); }

// Up to think_end and with it, and what comes before the next part of the answer.
Grammar rest_of_thought(const ChatSyntax& syntax, const Tokenizer& tokenizer) {
  const auto id = tokenizer.id_of(syntax.think_end);
  Grammar rest = id && tokenizer.is_special(*id)
                     ? sequence_grammar({text_without_grammar(""), token_grammar(*id)})
                     : until_grammar(syntax.think_end);
  if (syntax.frames) return sequence_grammar({std::move(rest), marker_grammar(kFrames.begin, tokenizer)});
  if (!syntax.channels) return sequence_grammar({std::move(rest), line_breaks(2)});
  return sequence_grammar({std::move(rest), marker_grammar(kChannels.start, tokenizer),
                           literal_grammar(std::string(kChannels.role))});
}

// A thought must end if the prompt opened it, and may come at all if the model knows it.
Grammar thought(const ChatSyntax& syntax, const Tokenizer& tokenizer, const ReplyParser::Start& start) {
  if (syntax.think_end.empty()) return nothing();
  Grammar rest = rest_of_thought(syntax, tokenizer);
  if (start.thinking) return rest;
  return choice_grammar(
      {sequence_grammar({marker_grammar(syntax.think_begin, tokenizer), std::move(rest)}), nothing()});
}

Grammar arguments_grammar(const OrderedJson& function) {
  const OrderedJson& schema = function["parameters"];
  return schema.empty() ? json_object_grammar() : json_schema_grammar(schema);
}

Grammar one_of(std::string_view characters) {
  std::vector<Grammar> each;
  for (const char c : characters) each.push_back(literal_grammar(std::string(1, c)));
  return choice_grammar(each);
}

constexpr std::string_view kDigits = "0123456789", kDigitsAndSmall = "0123456789abcdefghijklmnopqrstuvwxyz",
                           kDigitsAndLetters =
                               "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

Grammar id_number() {
  return choice_grammar({literal_grammar("0"), sequence_grammar({one_of(kDigits.substr(1)),
                                                                 repeat_grammar(one_of(kDigits), 0, 2)})});
}

// The name of a kNamed call, with an id where the syntax has one, of letters and digits as models make them up. Where
// it may have one, models without a token for its mark have not learnt to write it.
Grammar named_head(const CallWriter& writer, const std::string& name) {
  const Grammar spelled = literal_grammar(name);
  const std::string_view mark = writer.syntax.markers.id_mark;
  switch (writer.syntax.ids) {
    case IdPlace::kInName:
      return sequence_grammar({literal_grammar("functions." + name + ":"), id_number()});
    case IdPlace::kBeforeName:
      return sequence_grammar(
          {repeat_grammar(one_of(kDigitsAndSmall), 10, 10), marker_grammar(mark, writer.tokenizer), spelled});
    case IdPlace::kBehindName:
      if (!writer.tokenizer.id_of(mark)) return spelled;
      return sequence_grammar(
          {spelled, repeat_grammar(sequence_grammar({marker_grammar(mark, writer.tokenizer),
                                                     repeat_grammar(one_of(kDigitsAndLetters), 9, 9)}),
                                   0, 1)});
    case IdPlace::kNone:
      break;
  }
  return spelled;
}

Grammar object_call(const OrderedJson& function) {
  return sequence_grammar({literal_grammar("{\"name\": " + function["name"].dump() + ", \"arguments\": "),
                           arguments_grammar(function), literal_grammar("}")});
}

// What stands for one function: a call with its markers, or an item of a list.
Grammar call(const CallWriter& writer, const OrderedJson& function) {
  const CallSyntax& row = writer.syntax;
  const std::string& name = function["name"].get_ref<const std::string&>();
  const auto mark = [&](std::string_view spelled) { return marker_grammar(spelled, writer.tokenizer); };
  switch (row.form) {
    case CallForm::kTags:
      return tag_call_grammar(writer, function);
    case CallForm::kObject:
      return sequence_grammar({mark(row.markers.call_begin), literal_grammar("\n"), object_call(function),
                               literal_grammar("\n"), mark(row.markers.call_end)});
    case CallForm::kList:
      return object_call(function);
    case CallForm::kFenced:
      return sequence_grammar({mark(row.markers.call_begin), literal_grammar("function"),
                               mark(row.markers.separator), literal_grammar(name + "\n```json\n"),
                               arguments_grammar(function), literal_grammar("\n```"),
                               mark(row.markers.call_end)});
    case CallForm::kChannel:
      return sequence_grammar(
          {mark(kChannels.channel),
           literal_grammar("commentary to=" + std::string(kChannels.functions) + name + " "),
           mark(kChannels.constrain), literal_grammar("json"), mark(kChannels.message),
           arguments_grammar(function)});
    default:
      break;
  }
  return sequence_grammar({mark(row.markers.call_begin), named_head(writer, name),
                           mark(row.markers.separator), arguments_grammar(function),
                           mark(row.markers.call_end)});
}

// Some models write a space before the list, others none.
Grammar list_of_calls(const CallWriter& writer, const Grammar& call, const ToolChoice& choice) {
  std::vector<Grammar> parts = {marker_grammar(writer.syntax.markers.call_begin, writer.tokenizer),
                                repeat_grammar(literal_grammar(" "), 0, 1), literal_grammar("["), call};
  if (choice.parallel)
    parts.push_back(repeat_grammar(sequence_grammar({literal_grammar(", "), call}), 0, -1));
  parts.push_back(literal_grammar("]"));
  return sequence_grammar(parts);
}

// The calls of an answer. A message to a function ends the answer, so that channels have one.
Grammar all_calls(const CallWriter& writer, const Grammar& call, const ToolChoice& choice) {
  const CallSyntax& row = writer.syntax;
  if (row.form == CallForm::kList) return list_of_calls(writer, call, choice);
  const Grammar line = literal_grammar(std::string(row.line));
  const bool tagged = row.form == CallForm::kTags && !row.markers.section_begin.empty();
  std::vector<Grammar> parts;
  const auto mark = [&](std::string_view spelled) {
    if (!spelled.empty()) parts.push_back(marker_grammar(spelled, writer.tokenizer));
  };
  mark(row.markers.section_begin);
  if (tagged) parts.push_back(line);
  parts.push_back(call);
  if (choice.parallel && row.form != CallForm::kChannel)
    parts.push_back(repeat_grammar(sequence_grammar({line, call}), 0, -1));
  if (tagged) parts.push_back(line);
  if (!row.section_ends_answer) mark(row.markers.section_end);
  return sequence_grammar(parts);
}

}  // namespace

Grammar marker_grammar(std::string_view spelled, const Tokenizer& tokenizer) {
  if (const auto id = tokenizer.id_of(spelled); id && !spelled.empty()) return token_grammar(*id);
  std::vector<Grammar> parts;
  std::string plain;
  for (size_t at = 0; at < spelled.size();) {
    const AddedToken* longest = nullptr;
    for (const AddedToken& token : tokenizer.added_tokens())
      if (token.special && spelled.substr(at).starts_with(token.content) && !token.content.empty() &&
          (!longest || token.content.size() > longest->content.size()))
        longest = &token;
    if (!longest) {
      plain += spelled[at++];
      continue;
    }
    parts.push_back(literal_grammar(std::exchange(plain, {})));
    parts.push_back(token_grammar(longest->id));
    at += longest->content.size();
  }
  parts.push_back(literal_grammar(plain));
  return sequence_grammar(parts);
}

Grammar answer_grammar(const ChatSyntax& syntax, const Tokenizer& tokenizer, Grammar answer,
                       const ReplyParser::Start& start) {
  if (syntax.frames)
    return sequence_grammar(
        {thought(syntax, tokenizer, start), marker_grammar(kFrames.text, tokenizer), std::move(answer)});
  // What is thought of its own accord would be an answer that fits no format.
  if (!syntax.channels)
    return start.thinking ? sequence_grammar({thought(syntax, tokenizer, start), std::move(answer)})
                          : std::move(answer);
  return sequence_grammar({thought(syntax, tokenizer, start), marker_grammar(kChannels.channel, tokenizer),
                           literal_grammar("final"), marker_grammar(kChannels.message, tokenizer),
                           std::move(answer)});
}

Grammar tool_call_grammar(const ChatSyntax& syntax, const Tokenizer& tokenizer, const OrderedJson& tools,
                          const ToolChoice& choice, const ReplyParser::Start& start) {
  if (syntax.tools == ToolSyntax::kNone) fail("tool_choice: this model has no syntax for calls that we know");
  const ArgumentTypes types(tools);
  const CallWriter writer{.syntax = call_syntax(syntax.tools), .tokenizer = tokenizer, .types = types};
  std::vector<Grammar> calls;
  size_t states = 0;
  for (size_t i = 0; i < tools.size(); ++i) {
    const OrderedJson& function = tools[i]["function"];
    if (!choice.name.empty() && choice.name != function["name"].get_ref<const std::string&>()) continue;
    try {
      calls.push_back(call(writer, function));
    } catch (const Error& error) {
      fail_as(error.kind(), "tools[{}].function.parameters: {}", i, error.what());
    }
    if ((states += grammar_size(calls.back())) > kMostCallStates)
      fail("tools: their schemas are too large together; tools[{}] is the first too many", i);
  }
  if (calls.empty()) fail("tool_choice: no function \"{}\" among the tools", choice.name);
  const Grammar any = calls.size() == 1 ? calls[0] : choice_grammar(calls);
  return sequence_grammar({thought(syntax, tokenizer, start), all_calls(writer, any, choice)});
}

}  // namespace kt::inline server
