// Calls whose arguments are a JSON object, in whatever stands around it.
#pragma once
#include "server/syntax/call_reader.h"
#include "server/syntax/json_scanner.h"

namespace kt::inline server {

class JsonCallReader final : public CallReader {
 public:
  explicit JsonCallReader(const CallSyntax& syntax);
  // kChannel: the header has told the name.
  JsonCallReader(const CallSyntax& syntax, std::string name);

  // What follows is an item of a list.
  void begin_item();
  bool complete() const override { return phase_ == Phase::kTail; }

 private:
  enum class Phase {
    kType,      // kNamed, kFenced: up to the separator; or [ where lists are read
    kName,      // kFenced: up to the end of the line
    kFence,     // white space, perhaps ```json, then {
    kOpen,      // kObject, items of lists: {
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
  Step read(char c) override;
  Step take(char c);
  bool settled() const;
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
  bool take_head(std::string_view head);

  bool take_kimis_head(std::string_view head);

  const CallSyntax& syntax_;
  const ToolMarkers& markers_;
  Phase phase_;
  bool object_;                           // name and arguments stand in one object
  std::string word_;                      // what the phase collects
  size_t id_mark_ = 0, behind_mark_ = 0;  // kType: where the id's mark begins and ends in it; 0: nowhere
  JsonScanner scanner_;
  std::string key_;
  std::string escape_;  // an escape, or half of a surrogate pair, within kString
  bool has_arguments_ = false, any_argument_ = false, fence_closed_ = false;
};

}  // namespace kt::inline server
