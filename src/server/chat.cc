// POST /v1/chat/completions.
#include <ctime>

#include "base/error.h"
#include "server/answer.h"
#include "server/chat_plan.h"
#include "server/endpoints.h"
#include "server/generation.h"
#include "server/service.h"

namespace kt::inline server {
namespace {

struct ToolCall {
  std::string id, name, arguments;
};

class ChatAnswer final : public Answer {
 public:
  ChatAnswer(Service& service, Responder responder, StreamOptions options, const ChatPlan& plan)
      : Answer(service, std::move(responder), options.stream, plan.requests.size(), plan.requests.size()),
        usage_wanted_(options.usage) {
    for (size_t i = 0; i < plan.requests.size(); ++i)
      choices_.emplace_back(ReplyParser(plan.syntax, plan.start));
    head_ = text("{{\"id\":\"{}\",\"object\":\"chat.completion{}\",\"created\":{},\"model\":{}",
                 random_id("chatcmpl-"), options.stream ? ".chunk" : "", std::time(nullptr),
                 json_string(service.model_name(plan.requests.front().adapter)));
  }

 private:
  struct Choice {
    explicit Choice(ReplyParser reader) : parser(std::move(reader)) {}
    ReplyParser parser;
    bool reasoning_last = false;
    std::string content, reasoning, finish;
    std::vector<ToolCall> calls;
    OrderedJson logprobs = OrderedJson::array();  // stream: of this event
  };

  void begin() override {
    if (!stream()) return;
    for (size_t i = 0; i < choices_.size(); ++i) send_delta(i, "{\"role\":\"assistant\",\"content\":\"\"}");
  }

  void event(size_t sequence, const AnswerEvent& event) override {
    Choice& choice = choices_[sequence];
    if (event.token && event.token->logprob)
      choice.logprobs.push_back(logprob_json(service().tokenizer(), *event.token));
    std::vector<ReplyPiece> pieces = choice.parser.push(event.text);
    if (event.finish)
      for (ReplyPiece& piece : choice.parser.flush(end_of(event.finish->reason)))
        pieces.push_back(std::move(piece));
    if (!pieces.empty()) choice.reasoning_last = pieces.back().kind == ReplyPiece::Kind::kReasoning;
    if (event.token && choice.reasoning_last) count_reasoning_token();
    for (ReplyPiece& piece : pieces) take_piece(sequence, std::move(piece));
    if (!event.finish) return;
    choice.finish = name_of(event.finish->reason);
    // A call that was cut off is no call.
    if (choice.parser.calls() > 0 && !choice.parser.cut_off() && event.finish->reason == FinishReason::kStop)
      choice.finish = "tool_calls";
    if (stream()) send_delta(sequence, "{}");
  }

  void take_piece(size_t sequence, ReplyPiece piece) {
    Choice& choice = choices_[sequence];
    const auto whole = [&](std::string& into, const char* key) {
      if (stream()) return send_delta(sequence, text("{{\"{}\":{}}}", key, json_string(piece.text)));
      into += piece.text;
    };
    switch (piece.kind) {
      case ReplyPiece::Kind::kReasoning:
        return whole(choice.reasoning, "reasoning_content");
      case ReplyPiece::Kind::kContent:
        return whole(choice.content, "content");
      case ReplyPiece::Kind::kCall: {
        choice.calls.push_back({piece.id.empty() ? random_id("call_") : piece.id, piece.text, {}});
        if (!stream()) return;
        return send_delta(
            sequence, text("{{\"tool_calls\":[{{\"index\":{},\"id\":{},\"type\":\"function\",\"function\":{{"
                           "\"name\":{},\"arguments\":\"\"}}}}]}}",
                           piece.call, json_string(choice.calls.back().id), json_string(piece.text)));
      }
      case ReplyPiece::Kind::kArguments: {
        if (!stream()) {
          choice.calls.at(static_cast<size_t>(piece.call)).arguments += piece.text;
          return;
        }
        return send_delta(sequence,
                          text("{{\"tool_calls\":[{{\"index\":{},\"function\":{{\"arguments\":{}}}}}]}}",
                               piece.call, json_string(piece.text)));
      }
    }
  }

  void send_delta(size_t sequence, std::string_view delta) {
    Choice& choice = choices_[sequence];
    std::string chunk = head_ + text(",\"choices\":[{{\"index\":{},\"delta\":{}", sequence, delta);
    chunk += ",\"logprobs\":" + take_logprobs(choice);
    chunk += ",\"finish_reason\":" + (choice.finish.empty() ? "null" : json_string(choice.finish)) + "}]";
    if (usage_wanted_) chunk += ",\"usage\":null";
    send_event(chunk + "}");
  }

  static std::string take_logprobs(Choice& choice) {
    if (choice.logprobs.empty()) return "null";
    const OrderedJson out = {{"content", std::exchange(choice.logprobs, OrderedJson::array())}};
    return json_text(out);
  }

  void end() override {
    const std::string usage = ",\"usage\":" + usage_json(this->usage()).dump() + "}";
    if (stream()) {
      if (usage_wanted_) send_event(head_ + ",\"choices\":[]" + usage);
      return send("data: [DONE]\n\n");
    }
    std::string whole = head_ + ",\"choices\":[";
    for (size_t i = 0; i < choices_.size(); ++i) whole += (i > 0 ? "," : "") + json_of(i);
    reply(whole + "]" + usage);
  }

  std::string json_of(size_t index) {
    Choice& choice = choices_[index];
    OrderedJson message = {{"role", "assistant"}};
    message["content"] =
        choice.content.empty() && !choice.calls.empty() ? OrderedJson() : OrderedJson(choice.content);
    if (!choice.reasoning.empty()) message["reasoning_content"] = choice.reasoning;
    for (const ToolCall& call : choice.calls)
      message["tool_calls"].push_back({{"id", call.id},
                                       {"type", "function"},
                                       {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
    return text("{{\"index\":{},\"message\":{},\"logprobs\":{},\"finish_reason\":{}}}", index,
                json_text(message), take_logprobs(choice), json_string(choice.finish));
  }

  const bool usage_wanted_;
  std::string head_;  // of every JSON object that goes out, without its end
  std::vector<Choice> choices_;
};

}  // namespace

void post_chat_completions(Service& service, HttpRequest& request, const Responder& responder) {
  const OrderedJson body = parse_body(request);
  ChatPlan plan = plan_chat(service, body);
  const auto answer =
      std::make_shared<ChatAnswer>(service, responder, read_stream_options(Fields(body)), plan);
  service.run(answer, std::move(plan.requests));
}

}  // namespace kt::inline server
