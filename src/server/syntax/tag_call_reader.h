// Calls whose arguments stand in tags, a key and a value each: JSON is made of them as they come. Values are text up to
// the tag that ends them; see ReplyParser for where such a tag counts, ArgumentTypes for what becomes of the text.
#pragma once
#include <set>

#include "server/syntax/call_reader.h"
#include "server/syntax/json_scanner.h"

namespace kt::inline server {

class TagCallReader final : public CallReader {
 public:
  TagCallReader(const CallSyntax& syntax, std::shared_ptr<const ArgumentTypes> types);

  bool complete() const override { return phase_ == Phase::kTail; }
  void end(AnswerEnd end) override;

 private:
  enum class Phase {
    kNameBegin,   // name_begin
    kName,        // up to name_end
    kBetween,     // a key, or what ends the arguments
    kKey,         // up to key_end
    kValueBegin,  // value_begin
    kValue,       // up to value_end with another tag behind it
    kTail,        // call_end
  };
  enum class Match { kNo, kPartly, kWhole };

  Step read(char c) override;
  Step expect(char c, std::string_view marker, Phase then);
  Step name(char c);
  Step name_until_tag(char c);
  Step between(char c);
  Step key(char c);
  Step value(char c);
  bool end_name(std::string_view text);
  void begin_value(TypeSet types);
  Match match_end(std::string_view text);
  void value_byte(char c);
  void finish_value();
  Step follow(std::string_view tag);
  void close();

  const CallSyntax& syntax_;
  const TagMarkers& tags_;
  const std::shared_ptr<const ArgumentTypes> types_;
  Phase phase_;
  std::string word_;  // what the phase collects
  std::string key_;
  std::set<std::string, std::less<>> keys_;  // that have a value

  // Of the value that is being read.
  TypeSet value_types_;
  bool repeats_ = false;      // its key has one already: it counts for nothing
  bool streams_ = false;      // it is a string and nothing else
  bool fresh_ = false;        // nothing of it came yet
  bool begun_ = false;        // something but space came
  bool guarded_ = false;      // it may be JSON: within its strings no tag counts
  JsonScanner scanner_;       // of it, while guarded_
  std::string value_;         // if it does not stream
  std::string held_;          // what may be its end
  std::string_view follows_;  // the tag behind its end, after Match::kWhole
};

}  // namespace kt::inline server
