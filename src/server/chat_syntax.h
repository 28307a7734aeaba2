// How models mark thinking and tool calls in their text, and the way back: pieces of an answer as the API
// names them. Knows nothing of HTTP or of batches.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "engine/grammar/grammar.h"
#include "engine/tokenizer.h"

namespace kt {

using OrderedJson = nlohmann::ordered_json;

enum class ToolSyntax {
  kNone,
  kHermes,      // <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>   (Qwen, Hermes)
  kDeepSeekV3,  // <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{...}\n```<｜tool▁call▁end｜>
  kDeepSeekV31  // <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
};

struct ChatSyntax {
  std::string think_begin = {},
              think_end = {};  // "<think>", "</think>"; empty: the model does not think aloud
  ToolSyntax tools = ToolSyntax::kNone;
  bool operator==(const ChatSyntax&) const = default;
};
// What a model's template and vocabulary say.
ChatSyntax chat_syntax_of(std::string_view chat_template, const Tokenizer& tokenizer);

struct ReplyPiece {
  enum class Kind {
    kReasoning,  // text that was thought
    kContent,    // text of the answer
    kCall,       // tool call number `call` begins; text is the function's name
    kArguments,  // a piece of its arguments, JSON as the model wrote it
  };
  Kind kind = Kind::kContent;
  int call = 0;
  std::string text = {};
  bool operator==(const ReplyPiece&) const = default;
};

// One answer as it comes. Text goes out as soon as it cannot be part of a marker. A call that is malformed
// comes out as content, nothing is lost; how the text is cut into pieces makes no difference to the
// concatenation.
class ReplyParser {
 public:
  struct Start {
    bool thinking = false;  // the prompt ended inside think_begin
    bool tools = false;     // the request has tools; without them calls are content
  };
  ReplyParser(ChatSyntax syntax, Start start);
  std::vector<ReplyPiece> push(std::string_view text);
  std::vector<ReplyPiece> flush();  // the end of the answer
  int calls() const { return calls_; }

 private:
  // the helper fills this in
  int calls_ = 0;
};

// `messages` and `tools` of a chat request, checked and made into what templates expect: contents that are
// lists of text parts joined, arguments of earlier calls as objects, developer messages as system ones.
// Error(kInput) "messages[2].content: ..." names the place.
OrderedJson template_messages(const OrderedJson& messages);
OrderedJson template_tools(const OrderedJson& tools);

// Calls that an answer may make.
struct ToolChoice {
  enum class Kind { kNone, kAuto, kRequired } kind = Kind::kAuto;
  std::string name = {};  // only this function; kRequired
  bool parallel = true;   // more than one call
};
ToolChoice tool_choice_of(const OrderedJson& request);  // tools, tool_choice, parallel_tool_calls

// The language of an answer that must call tools (kRequired), in the model's syntax, arguments held to each
// function's schema. Error(kInput) if the model has no syntax for calls.
Grammar tool_call_grammar(const ChatSyntax& syntax, const Tokenizer& tokenizer, const OrderedJson& tools,
                          const ToolChoice& choice);

}  // namespace kt
