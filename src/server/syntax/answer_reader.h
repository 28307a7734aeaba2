// Text of an answer on its way to pieces: what the readers of the two kinds of answers have in common.
#pragma once
#include <initializer_list>
#include <set>

#include "server/syntax/call_reader.h"

namespace kt::inline server {

// The pieces of one answer, and what is known of its calls.
class ReplyPieces {
 public:
  void add(ReplyPiece::Kind kind, std::string_view text);
  // What the reader has since the last time: the name once, arguments.
  void add_call(CallReader& reader);
  std::vector<ReplyPiece> take() { return std::exchange(pieces_, {}); }

  int calls() const { return calls_; }
  bool cut_off() const { return cut_off_; }
  void set_cut_off() { cut_off_ = true; }

 private:
  std::vector<ReplyPiece> pieces_;
  std::set<std::string> ids_;  // of calls; one that comes twice is none
  int calls_ = 0;
  bool cut_off_ = false;
};

class AnswerReader {
 public:
  virtual ~AnswerReader() = default;
  virtual void push(std::string_view text) = 0;
  virtual void flush(AnswerEnd end) = 0;
};

// Where the first of the markers begins in the text, or could begin if more text came. Empty ones are none.
struct FoundMarker {
  size_t at = 0;
  std::string_view marker = {};  // empty: not yet
};
FoundMarker find_marker(std::string_view text, std::initializer_list<std::string_view> wanted);

}  // namespace kt::inline server
