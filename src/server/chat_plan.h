// From the body of a chat request to what the engine is to run and how its text is read back.
#pragma once
#include "engine/scheduler.h"
#include "server/fields.h"
#include "server/syntax/chat_syntax.h"

namespace kt::inline server {

class Service;

struct ChatPlan {
  std::vector<GenerateRequest> requests;  // n of them, without events
  ChatSyntax syntax;
  ReplyParser::Start start;
};

inline AnswerEnd end_of(FinishReason reason) {
  return reason == FinishReason::kStop ? AnswerEnd::kStop : AnswerEnd::kCut;
}

// ApiError names the field at fault. Anthropic's bodies are translated before.
ChatPlan plan_chat(Service& service, const OrderedJson& body);

}  // namespace kt::inline server
