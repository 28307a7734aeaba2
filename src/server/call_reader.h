// One tool call as it comes, byte by byte, behind the marker that begins it.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "server/chat_syntax.h"
#include "server/json_scanner.h"

namespace kt {

class CallReader {
 public:
  explicit CallReader(ToolSyntax syntax);

  enum class Step {
    kMore,
    kDone,  // this byte is the last of the marker that ends the call
    kBad,   // this byte cannot be part of the call
  };
  Step push(char c);

  // Once, when the call is certain: its name.
  std::optional<std::string> take_name();
  // Arguments since the last time; empty before the call is certain.
  std::string take_arguments();
  // The name is known and the arguments have begun: the call cannot be taken back.
  bool certain() const { return certain_; }
  // Nothing is missing but the marker that ends the call.
  bool complete() const { return phase_ == Phase::kTail; }
  // Name and arguments tell all that was pushed. What comes after must be kept in case it is no part of the
  // call.
  bool settled() const;

 private:
  enum class Phase {
    kType,      // DeepSeek: up to the separator
    kName,      // DeepSeek V3: up to the end of the line
    kFence,     // DeepSeek: white space, perhaps ```json, then {
    kOpen,      // Hermes: {
    kFirstKey,  // " or }
    kKey,       // "
    kInKey,     // the rest of a key
    kColon,     // :
    kValue,     // the first byte of a value
    kInName,    // the rest of the name
    kOther,     // the rest of a value that says nothing to us
    kObject,    // arguments
    kString,    // arguments in a string
    kNull,      // instead of arguments
    kNext,      // , or }
    kTail,      // what ends a call
  };
  Step structural(char c);
  Step start_value(char c);
  Step scan(char c);
  Step end_scan();
  Step next(char c);
  Step type(char c);
  Step name_line(char c);
  Step fence(char c);
  Step tail(char c);
  void start_scan(Phase phase, char first);
  bool end_key_or_name();
  void add_byte(char c);
  bool add_unescaped(char c);
  bool end_escape();
  bool add_text(std::string_view text);
  void arguments_begin();
  void update_certain();

  ToolSyntax syntax_;
  ToolMarkers markers_;
  Phase phase_;
  std::string word_;  // what the phase collects
  JsonScanner scanner_;
  std::string key_, name_, arguments_;
  std::string escape_;  // an escape, or half of a surrogate pair, within kString
  bool has_arguments_ = false, any_argument_ = false, fence_closed_ = false;
  bool certain_ = false, told_ = false;
};

}  // namespace kt
