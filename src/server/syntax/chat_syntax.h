// How models mark thinking and tool calls in their text, and the way back: pieces of an answer as the API
// names them. Knows nothing of HTTP or of batches.
#pragma once
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/chat_prompt.h"
#include "server/syntax/argument_types.h"
#include "text/grammar/grammar.h"
#include "text/tokenizer/tokenizer.h"

namespace kt::inline server {

// What each looks like, call_syntax.cc has; `kt`'s documents have the rules.
enum class ToolSyntax {
  kNone,
  kHermes,       // <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>   (Qwen, Hermes)
  kDeepSeekV3,   // <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{...}\n```<｜tool▁call▁end｜>
  kDeepSeekV31,  // <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
  kDeepSeekV32,  // <｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>...
  kDeepSeekV4,  // the same in tool_calls instead of function_calls
  kGlm45,       // <tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n...</tool_call>
  kGlm47,       // the same without line breaks; both are read alike
  kQwen3Coder,  // <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>
  kMiniMaxM2,  // <invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n</invoke> in <minimax:tool_call>
  kKimiK2,     // <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
  kGptOss,  // a message on a channel: <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}
  kMistral,      // [TOOL_CALLS]NAME[ARGS]{...}, or with an id: [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}
  kMistralList,  // [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]; both are read alike
  kHy3,          // <tool_call>NAME<tool_sep>\n and tags as kGlm45, in <tool_calls>
  kHy3Open,      // the same with <tool_call:opensource>, and so all other markers
  kSolarOpen     // <|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>
};
inline constexpr std::array kToolSyntaxes = {
    ToolSyntax::kHermes,      ToolSyntax::kDeepSeekV3, ToolSyntax::kDeepSeekV31, ToolSyntax::kDeepSeekV32,
    ToolSyntax::kDeepSeekV4,  ToolSyntax::kGlm45,      ToolSyntax::kGlm47,       ToolSyntax::kQwen3Coder,
    ToolSyntax::kMiniMaxM2,   ToolSyntax::kKimiK2,     ToolSyntax::kGptOss,      ToolSyntax::kMistral,
    ToolSyntax::kMistralList, ToolSyntax::kHy3,        ToolSyntax::kHy3Open,     ToolSyntax::kSolarOpen};

struct ChatSyntax {
  std::string think_begin = {},
              think_end = {};  // "<think>", "</think>"; empty: the model does not think aloud
  ToolSyntax tools = ToolSyntax::kNone;
  // Answers are messages with headers, as gpt-oss writes them: think_begin is the header of a thought, think_end what
  // ends a message.
  bool channels = false;
  // Answers are messages, each behind a marker of its kind, as Solar-Open writes them: think_begin is a thought's.
  bool frames = false;
  bool operator==(const ChatSyntax&) const = default;
};
// What a model's template and vocabulary say; the vocabulary is asked about thinking only when there is no
// template. Tools are kNone for syntaxes of calls that we do not read: with_tool_prompt and kHermes serve
// those.
ChatSyntax chat_syntax_of(std::string_view chat_template, const Tokenizer& tokenizer);

// Names of parsers as other servers spell them; case, '-' and '_' do not count. nullopt: no such name. The second
// gives the markers of thinking, `channels` and `frames` only. Where a name means a family that spells its markers in
// more than one way, what the template shows decides.
std::optional<ToolSyntax> tool_syntax_named(std::string_view name, const ChatSyntax& shown = {});
std::optional<ChatSyntax> reasoning_syntax_named(std::string_view name, const ChatSyntax& shown = {});
// Those that people are shown: one for each syntax, the plainest.
std::vector<std::string> tool_parser_names();
std::vector<std::string> reasoning_parser_names();
// All of them, for who looks for the nearest.
std::vector<std::string> all_parser_names();
std::string name_of(ToolSyntax syntax);
// The syntax of a model whose calls, or thoughts, are said to be others than its template shows.
ChatSyntax with_tool_syntax(ChatSyntax shown, ToolSyntax tools);
ChatSyntax with_reasoning(ChatSyntax shown, const ChatSyntax& named);

// Whether the answer to this prompt begins inside think_begin: the prompt ends in it, but for white space.
bool prompt_opens_thinking(const ChatSyntax& syntax, std::string_view rendered_prompt);

// How answers are to become text for ReplyParser: kKeep when a marker is a special token or contains one.
SpecialTokens answer_decoding(const ChatSyntax& syntax, const Tokenizer& tokenizer);
// Tokens that end an answer in this syntax whether or not the model's folder says so.
std::vector<TokenId> answer_end_tokens(const ChatSyntax& syntax, const Tokenizer& tokenizer);

struct ReplyPiece {
  enum class Kind {
    kReasoning,  // text that was thought
    kContent,    // text of the answer
    kCall,       // tool call number `call` begins; text is the function's name
    kArguments,  // a piece of its arguments, JSON as the model wrote it or as its tags mean it
  };
  Kind kind = Kind::kContent;
  int call = 0;
  std::string text = {};
  std::string id = {};  // kCall: the call's id where the model gives one, different from all before
  bool operator==(const ReplyPiece&) const = default;
};

enum class AnswerEnd {
  kStop,  // of its own accord, or at a stop string
  kCut    // anything else
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
//
// Arguments in tags become JSON: strings stream, all others come when they are complete, typed by Start::types. A tag
// that ends a value counts only where white space and another tag follow it, and not within a string of JSON. Of a key
// that comes twice the first value counts, as it is told already when the second comes. A call that lacks only its end
// is whole if the answer stopped of its own accord.
//
// Frames (Solar-Open): messages of thoughts, of text and of calls in any order; a gap parts messages of one kind.
//
// Channels (gpt-oss): analysis is thought, messages to functions are calls, all others are content; a gap parts
// messages of one kind. Their text is left as it is. A header that the answer's end cut off tells nothing.
class ReplyParser {
 public:
  struct Start {
    bool thinking = false;                            // the prompt ended inside think_begin
    bool tools = false;                               // the request has tools; without them calls are content
    std::shared_ptr<const ArgumentTypes> types = {};  // of the tools' arguments, for syntaxes without types
  };
  ReplyParser(ChatSyntax syntax, const Start& start);
  ~ReplyParser();
  ReplyParser(ReplyParser&&) noexcept;
  ReplyParser& operator=(ReplyParser&&) noexcept;

  // Neighbouring pieces differ in kind or call, and none is empty.
  std::vector<ReplyPiece> push(std::string_view text);
  std::vector<ReplyPiece> flush(AnswerEnd end = AnswerEnd::kStop);
  int calls() const;
  bool cut_off() const;  // after flush(): the answer ended within the arguments of a call

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// An answer as the model brings it: behind the thought that the prompt has opened, if it has, and behind the headers
// of its messages where it writes those.
Grammar answer_grammar(const ChatSyntax& syntax, const Tokenizer& tokenizer, Grammar answer,
                       const ReplyParser::Start& start);

// The language of an answer that must call tools (kRequired), in the model's syntax, arguments held to each
// function's schema; `tools` as template_tools gives them. Thinking comes first: it must end if the prompt
// opened it (start.thinking), and may come at all if the model knows it. Error(kInput) if the model has no
// syntax for calls, or for a schema ("tools[1].function.parameters: ...").
Grammar tool_call_grammar(const ChatSyntax& syntax, const Tokenizer& tokenizer, const OrderedJson& tools,
                          const ToolChoice& choice, const ReplyParser::Start& start = {});

}  // namespace kt::inline server
