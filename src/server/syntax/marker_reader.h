// Answers with markers in their text: a thought at the beginning, calls later on. Markers are found in what came so
// far; bytes of a call go to a CallReader and stay until the call is certain, because a malformed one is read again as
// content. Where answers are frames, each message begins as an answer does; its role and its kind may be missing.
#pragma once
#include "server/syntax/answer_reader.h"
#include "server/syntax/call_reader.h"

namespace kt::inline server {

class MarkerReader final : public AnswerReader {
 public:
  MarkerReader(ChatSyntax syntax, const ReplyParser::Start& start, ReplyPieces& out);

  void push(std::string_view text) override;
  void flush(AnswerEnd end) override;

 private:
  enum class Phase { kStart, kThoughtStart, kThought, kContent, kSection, kCall, kList };

  void add_content(std::string_view text);
  void add_thought(std::string_view text);
  void run();
  bool step();
  bool start();
  bool frame_start();
  void begin_text();
  bool thought_start();
  bool thought();
  bool content();
  bool section();
  bool call();
  bool list();
  void begin_call(std::unique_ptr<CallReader> reader);
  void end_call();
  void refuse_call();
  void skip_space();
  std::string_view rest() const { return std::string_view(input_).substr(at_); }

  const ChatSyntax syntax_;
  const CallSyntax& calls_;
  const ToolMarkers& markers_;
  const bool tools_;
  const std::shared_ptr<const ArgumentTypes> types_;
  ReplyPieces& out_;
  Phase phase_ = Phase::kContent;

  std::string input_;        // what came and is not settled
  size_t at_ = 0;            // all before is read
  size_t mark_ = 0;          // kSection, kCall: all before is settled
  size_t begin_size_ = 0;    // of the marker at mark_, while the call is not certain
  ptrdiff_t call_at_ = 0;    // where the call's own bytes began; negative once they are gone
  std::string gap_;          // white space that goes out before the next text, if there is one
  bool parts_ = false;       // gap_ is none of the model's: it parts messages
  bool drop_space_ = false;  // white space up to the next text is left out
  bool any_content_ = false, any_thought_ = false;
  bool in_section_ = false;
  std::unique_ptr<CallReader> reader_;
};

}  // namespace kt::inline server
