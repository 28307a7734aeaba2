// How models mark thinking and tool calls in their text, and the way back: pieces of an answer as the API
// names them. Knows nothing of HTTP or of batches.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/chat_prompt.h"
#include "text/grammar/grammar.h"
#include "text/tokenizer/tokenizer.h"

namespace kt {

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
// What a model's template and vocabulary say; the vocabulary is asked about thinking only when there is no
// template. Tools are kNone for syntaxes of calls that we do not read: with_tool_prompt and kHermes serve
// those.
ChatSyntax chat_syntax_of(std::string_view chat_template, const Tokenizer& tokenizer);
// By the names of SGLang's --tool-call-parser and --reasoning-parser; Error(kInput) lists them. The second
// sets only the markers of thinking.
ToolSyntax tool_syntax_named(std::string_view name);
ChatSyntax reasoning_syntax_named(std::string_view name);
// Whether the answer to this prompt begins inside think_begin: the prompt ends in it, but for white space.
bool prompt_opens_thinking(const ChatSyntax& syntax, std::string_view rendered_prompt);

// The markers around calls. Empty where a syntax has none.
struct ToolMarkers {
  std::string_view section_begin = {}, section_end = {};  // around all calls of an answer
  std::string_view call_begin = {}, separator = {}, call_end = {};
};
ToolMarkers tool_markers(ToolSyntax syntax);

// How answers are to become text for ReplyParser: kKeep when a marker is a special token.
SpecialTokens answer_decoding(const ChatSyntax& syntax, const Tokenizer& tokenizer);

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
//
// Thinking is recognised at the start of an answer only. White space around the thought, and around calls, is
// left out, but for one gap between content before and after calls. A call begins when its name is known and
// its arguments have begun; from there on they stream, and if their JSON breaks later on, the rest of the
// call is content. Line breaks and other control characters that a model wrote into a JSON string come out
// escaped, as JSON wants them. A call without arguments has "{}". An answer that ends within the arguments
// leaves them incomplete.
class ReplyParser {
 public:
  struct Start {
    bool thinking = false;  // the prompt ended inside think_begin
    bool tools = false;     // the request has tools; without them calls are content
  };
  ReplyParser(ChatSyntax syntax, Start start);
  ~ReplyParser();
  ReplyParser(ReplyParser&&) noexcept;
  ReplyParser& operator=(ReplyParser&&) noexcept;

  // Neighbouring pieces differ in kind or call, and none is empty.
  std::vector<ReplyPiece> push(std::string_view text);
  std::vector<ReplyPiece> flush();  // the end of the answer
  int calls() const;
  bool cut_off() const;  // after flush(): the answer ended within a call

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// An answer that comes after the thought which the prompt has opened.
Grammar after_thought_grammar(const ChatSyntax& syntax, const Tokenizer& tokenizer, Grammar answer);

// The language of an answer that must call tools (kRequired), in the model's syntax, arguments held to each
// function's schema; `tools` as template_tools gives them. Thinking comes first: it must end if the prompt
// opened it (start.thinking), and may come at all if the model knows it. Error(kInput) if the model has no
// syntax for calls, or for a schema ("tools[1].function.parameters: ...").
Grammar tool_call_grammar(const ChatSyntax& syntax, const Tokenizer& tokenizer, const OrderedJson& tools,
                          const ToolChoice& choice, ReplyParser::Start start = {});

}  // namespace kt
