// The markers of every syntax of tool calls, one row each: what readers look for and grammars write. A syntax that is
// made of known parts is a row here and a name in parser_names.cc.
#pragma once
#include <string_view>
#include <vector>

#include "server/syntax/chat_syntax.h"

namespace kt::inline server {

// What stands between the markers of a call.
enum class CallForm {
  kNone,
  kObject,   // {"name": ..., "arguments": {...}}
  kNamed,    // NAME separator {...}
  kFenced,   // a word, separator, NAME, a line break, {...} in a fence
  kTags,     // the name, then a key and a value in tags for each argument; strings bare
  kChannel,  // {...}; the name stands in the header of the message
  kList,     // [kObject, kObject, ...]; all calls of an answer behind one call_begin
};

// Where a call of kNamed has an id of its own.
enum class IdPlace {
  kNone,
  kInName,      // functions.NAME:0
  kBeforeName,  // ID id_mark NAME
  kBehindName,  // NAME id_mark ID, if there is one
};

// The markers around calls. Empty where a syntax has none.
struct ToolMarkers {
  std::string_view section_begin = {}, section_end = {};  // around all calls of an answer
  std::string_view call_begin = {}, separator = {}, call_end = {};
  std::string_view id_mark = {};  // begins with the same character as separator
};

// The tags of kTags, in the order in which they come. White space between them does not count.
struct TagMarkers {
  std::string_view name_begin = {};  // before the name, where call_begin does not end in it
  std::string_view name_end = {};    // empty: a line break or the next tag ends the name
  std::string_view key_begin = {}, key_end = {};
  std::string_view string_key_end = {}, json_key_end = {};  // key_end of syntaxes that say which a value is
  std::string_view value_begin = {}, value_end = {};
  std::string_view body_end = {};  // behind the last value, before call_end
  bool value_lines = false;        // a value stands on lines of its own
};

struct CallSyntax {
  CallForm form = CallForm::kNone;
  ToolMarkers markers = {};
  TagMarkers tags = {};
  std::string_view line = {};       // what models write between tags, and between calls
  std::string_view name_line = {};  // and behind the name
  // Whether a call may stand outside of a section: where its marker is no token, text about calls would become one.
  bool needs_section = false;
  bool lists = false;            // kNamed and kList: the one is read where the other is written
  IdPlace ids = IdPlace::kNone;  // kNamed
  bool ends_thought = false;     // the section's marker ends a thought that was left open
  bool section_ends_answer =
      false;  // section_end is one of the model's end tokens: it is read, but not asked for
};
const CallSyntax& call_syntax(ToolSyntax syntax);
// All that it has, none of them empty.
std::vector<std::string_view> markers_of(const CallSyntax& syntax);
inline const ToolMarkers& tool_markers(ToolSyntax syntax) { return call_syntax(syntax).markers; }

// gpt-oss: an answer is messages, each with a header that names its channel and perhaps whom it is for.
struct ChannelMarkers {
  std::string_view start = "<|start|>", channel = "<|channel|>", constrain = "<|constrain|>",
                   message = "<|message|>";
  std::string_view end = "<|end|>", call = "<|call|>", answer_end = "<|return|>";
  std::string_view role = "assistant", functions = "functions.";
};
inline constexpr ChannelMarkers kChannels;

// Solar-Open: an answer is messages; the prompt has written the first one's `begin`. Those of calls have the section's
// markers instead of `text` and `end`.
struct FrameMarkers {
  std::string_view role = "<|begin|>", begin = "<|begin|>assistant";
  std::string_view thought = "<|think|>", text = "<|content|>";
  std::string_view end = "<|end|>", answer_end = "<|flush|>";
};
inline constexpr FrameMarkers kFrames;

}  // namespace kt::inline server
