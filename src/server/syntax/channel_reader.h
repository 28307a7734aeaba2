// Answers that are messages on channels, as gpt-oss writes them:
//   [<|start|>assistant][ to=WHOM]<|channel|>CHANNEL[ to=WHOM][ <|constrain|>TYPE]<|message|>TEXT<|end|>
// with <|call|> or <|return|> instead of <|end|> where the answer is over. The prompt has written the first
// <|start|>assistant.
#pragma once
#include "server/syntax/marker_reader.h"

namespace kt::inline server {

class ChannelReader final : public AnswerReader {
 public:
  ChannelReader(const ChatSyntax& syntax, const ReplyParser::Start& start, ReplyPieces& out);

  void push(std::string_view text) override;
  void flush(AnswerEnd end) override;

 private:
  enum class Phase { kHeader, kThought, kContent, kCall };

  bool step();
  bool header();
  bool text_of_message();
  bool call();
  void begin_message(std::string_view header);
  void begin_text(Phase phase);
  void add_text(std::string_view text);
  void refuse_call();

  const bool thinks_, tools_;
  ReplyPieces& out_;
  MarkerReader content_;  // calls in the syntax of others, within content
  Phase phase_ = Phase::kHeader;
  std::string input_;   // what came and is not settled
  std::string header_;  // kCall: of the message, while the call is not certain
  std::string body_;    // kCall: what is not told of the body
  std::unique_ptr<CallReader> reader_;
  bool any_thought_ = false, any_content_ = false;
  bool gap_ = false;  // the next text is of another message than the one before
};

}  // namespace kt::inline server
