// POST /v1/responses: OpenAI's newer API, without what it would have to keep. An answer is a list of items, a thought,
// a message, calls, and a stream tells of each as it grows.
#include <ctime>

#include "base/error.h"
#include "server/answer.h"
#include "server/api_error.h"
#include "server/chat_plan.h"
#include "server/endpoints.h"
#include "server/responses_request.h"
#include "server/service.h"

namespace kt::inline server {
namespace {

OrderedJson or_else(const Fields& body, const char* name, const OrderedJson& otherwise) {
  const OrderedJson* given = body.find(name);
  return given ? *given : otherwise;
}

// All that does not change while the answer is made.
OrderedJson response_head(const Service& service, const Fields& body, int adapter) {
  const SamplingOptions& usual = service.default_sampling();
  return {{"id", random_id("resp_")},
          {"object", "response"},
          {"created_at", std::time(nullptr)},
          {"status", "in_progress"},
          {"background", false},
          {"error", nullptr},
          {"incomplete_details", nullptr},
          {"instructions", or_else(body, "instructions", nullptr)},
          {"max_output_tokens", or_else(body, "max_output_tokens", nullptr)},
          {"metadata", or_else(body, "metadata", OrderedJson::object())},
          {"model", service.model_name(adapter)},
          {"output", OrderedJson::array()},
          {"parallel_tool_calls", or_else(body, "parallel_tool_calls", true)},
          {"previous_response_id", nullptr},
          {"reasoning", or_else(body, "reasoning", OrderedJson{{"effort", nullptr}, {"summary", nullptr}})},
          {"store", false},
          {"temperature", or_else(body, "temperature", usual.temperature)},
          {"text", or_else(body, "text", OrderedJson{{"format", {{"type", "text"}}}})},
          {"tool_choice", or_else(body, "tool_choice", "auto")},
          {"tools", or_else(body, "tools", OrderedJson::array())},
          {"top_p", or_else(body, "top_p", usual.top_p)},
          {"truncation", "disabled"},
          {"usage", nullptr},
          {"user", or_else(body, "user", nullptr)}};
}

class ResponsesAnswer final : public Answer {
 public:
  ResponsesAnswer(Service& service, Responder responder, const Fields& body, const ChatPlan& plan)
      : Answer(service, std::move(responder), body.flag("stream", false), 1, 1),
        parser_(plan.syntax, plan.start),
        response_(response_head(service, body, plan.requests.front().adapter)) {}

 private:
  using Kind = ReplyPiece::Kind;  // kCall is never open: its arguments are

  void begin() override {
    send_named("response.created", {{"response", response_}});
    send_named("response.in_progress", {{"response", response_}});
  }

  void event(size_t, const AnswerEvent& event) override {
    std::vector<ReplyPiece> pieces = parser_.push(event.text);
    if (event.finish)
      for (ReplyPiece& piece : parser_.flush(end_of(event.finish->reason)))
        pieces.push_back(std::move(piece));
    if (!pieces.empty()) thinks_ = pieces.back().kind == Kind::kReasoning;
    if (event.token && thinks_) count_reasoning_token();
    for (const ReplyPiece& piece : pieces) take_piece(piece);
    if (!event.finish) return;
    const bool cut = event.finish->reason == FinishReason::kLength;
    close_item(cut || parser_.cut_off() ? "incomplete" : "completed");
    response_["status"] = cut ? "incomplete" : "completed";
    if (cut) response_["incomplete_details"] = {{"reason", "max_output_tokens"}};
  }

  void end() override {
    const Usage& used = usage();
    response_["output"] = output_;
    response_["usage"] = {
        {"input_tokens", used.prompt_tokens},
        {"input_tokens_details", {{"cached_tokens", used.cached_tokens}, {"cache_write_tokens", 0}}},
        {"output_tokens", used.completion_tokens},
        {"output_tokens_details", {{"reasoning_tokens", used.reasoning_tokens}}},
        {"total_tokens", used.prompt_tokens + used.completion_tokens}};
    if (!stream()) return reply(json_text(response_));
    const bool whole = response_["status"] == "completed";
    send_named(whole ? "response.completed" : "response.incomplete", {{"response", response_}});
  }

  void take_piece(const ReplyPiece& piece) {
    if (piece.kind == Kind::kCall) {
      close_item("completed");
      return open_item(Kind::kArguments, {{"type", "function_call"},
                                          {"id", random_id("fc_")},
                                          {"call_id", piece.id.empty() ? random_id("call_") : piece.id},
                                          {"name", piece.text},
                                          {"arguments", ""},
                                          {"status", "in_progress"}});
    }
    if (open_ != piece.kind) {
      close_item("completed");
      if (piece.kind == Kind::kReasoning)
        open_item(piece.kind, {{"type", "reasoning"},
                               {"id", random_id("rs_")},
                               {"summary", OrderedJson::array()},
                               {"content", OrderedJson::array()},
                               {"status", "in_progress"}});
      else
        open_item(piece.kind, {{"type", "message"},
                               {"id", random_id("msg_")},
                               {"status", "in_progress"},
                               {"role", "assistant"},
                               {"content", OrderedJson::array()}});
      send_of_item("response.content_part.added", {{"content_index", 0}, {"part", part("")}});
    }
    text_ += piece.text;
    if (piece.kind == Kind::kArguments)
      return send_of_item("response.function_call_arguments.delta", {{"delta", piece.text}});
    if (piece.kind == Kind::kReasoning)
      return send_of_item("response.reasoning_text.delta", {{"content_index", 0}, {"delta", piece.text}});
    send_of_item("response.output_text.delta",
                 {{"content_index", 0}, {"delta", piece.text}, {"logprobs", OrderedJson::array()}});
  }

  // The one part of a message or a thought.
  OrderedJson part(const std::string& string) const {
    if (open_ == Kind::kReasoning) return {{"type", "reasoning_text"}, {"text", string}};
    return {{"type", "output_text"},
            {"text", string},
            {"annotations", OrderedJson::array()},
            {"logprobs", OrderedJson::array()}};
  }

  void open_item(Kind kind, OrderedJson item) {
    open_ = kind;
    text_.clear();
    output_.push_back(std::move(item));
    send_named("response.output_item.added",
               {{"output_index", output_.size() - 1}, {"item", output_.back()}});
  }

  void close_item(const char* status) {
    if (!open_) return;
    OrderedJson& item = output_.back();
    item["status"] = status;
    if (open_ == Kind::kArguments) {
      item["arguments"] = text_;
      send_of_item("response.function_call_arguments.done", {{"arguments", text_}, {"name", item["name"]}});
    } else {
      item["content"].push_back(part(text_));
      if (open_ == Kind::kReasoning)
        send_of_item("response.reasoning_text.done", {{"content_index", 0}, {"text", text_}});
      else
        send_of_item("response.output_text.done",
                     {{"content_index", 0}, {"text", text_}, {"logprobs", OrderedJson::array()}});
      send_of_item("response.content_part.done", {{"content_index", 0}, {"part", item["content"].back()}});
    }
    send_named("response.output_item.done", {{"output_index", output_.size() - 1}, {"item", item}});
    open_.reset();
  }

  void send_of_item(const char* name, const OrderedJson& more) {
    if (!stream()) return;
    OrderedJson data = {{"item_id", output_.back()["id"]}, {"output_index", output_.size() - 1}};
    data.update(more);
    send_named(name, data);
  }

  void send_named(const char* name, const OrderedJson& data) {
    if (stream()) send(event_text(name, data, sequence_++));
  }

  static std::string event_text(const char* name, const OrderedJson& data, int64_t number) {
    OrderedJson out = {{"type", name}, {"sequence_number", number}};
    out.update(data);
    return text("event: {}\ndata: {}\n\n", name, json_text(out));
  }

  std::string stream_error(int, const std::string& why) const override {
    OrderedJson failed = response_;
    failed["status"] = "failed";
    failed["error"] = {{"code", "server_error"}, {"message", why}};
    return event_text("response.failed", {{"response", std::move(failed)}}, sequence_);
  }

  ReplyParser parser_;
  OrderedJson response_;
  OrderedJson output_ = OrderedJson::array();
  std::optional<Kind> open_;  // of the item that is being written
  std::string text_;          // of that item so far
  bool thinks_ = false;       // the last piece was of a thought
  int64_t sequence_ = 0;
};

}  // namespace

void post_responses(Service& service, HttpRequest& request, const Responder& responder) {
  const OrderedJson body = parse_body(request);
  ChatPlan plan = plan_chat(service, chat_of_responses(body));
  const auto answer = std::make_shared<ResponsesAnswer>(service, responder, Fields(body), plan);
  service.run(answer, std::move(plan.requests));
}

}  // namespace kt::inline server
