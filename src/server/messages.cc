// POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak: the request is translated into a chat
// request, the answer comes in blocks.
#include "base/error.h"
#include "server/answer.h"
#include "server/api_error.h"
#include "server/chat_plan.h"
#include "server/endpoints.h"
#include "server/generation.h"
#include "server/service.h"

namespace kt::inline server {
namespace {

// Text of a block list or of a string.
std::string text_of(const OrderedJson& content, const std::string& path) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) throw ApiError(400, path + ": expected a string or a list of blocks", path);
  std::string out;
  for (const OrderedJson& block : content) {
    if (!block.is_object())
      throw ApiError(400, text("{}: expected blocks, one is {}", path, shown_value(block)), path);
    const Fields fields(block, path + ".");
    if (fields.string("type").value_or("") != "text")
      throw ApiError(400, text("{}: only blocks of text can be read, got {}", path, shown_value(block)),
                     path);
    out += (out.empty() ? "" : "\n") + fields.string("text").value_or("");
  }
  return out;
}

// One message of theirs: tool results become messages of their own, calls a field.
void add_message(OrderedJson& into, const OrderedJson& message, const std::string& path) {
  if (!message.is_object()) throw ApiError(400, path + ": expected an object", path);
  const Fields fields(message, path + ".");
  const std::string role = fields.string("role").value_or("");
  const OrderedJson* content = fields.find("content");
  if (!content) fields.refuse("content", "a string or a list of blocks");
  if (!content->is_array()) return into.push_back({{"role", role}, {"content", *content}});
  std::string joined;
  OrderedJson calls = OrderedJson::array();
  for (const OrderedJson& block : *content) {
    if (!block.is_object()) fields.refuse_as("content", "expected blocks, one is " + shown_value(block));
    const Fields part(block, path + ".content.");
    const std::string type = part.string("type").value_or("");
    const OrderedJson* inner = part.find("content");
    if (type == "tool_result") {
      into.push_back({{"role", "tool"},
                      {"tool_call_id", part.string("tool_use_id").value_or("")},
                      {"content", inner ? text_of(*inner, path + ".content") : ""}});
    } else if (type == "tool_use") {
      const OrderedJson* input = part.find("input");
      calls.push_back(
          {{"id", part.string("id").value_or("")},
           {"type", "function"},
           {"function",
            {{"name", part.string("name").value_or("")}, {"arguments", input ? json_text(*input) : "{}"}}}});
    } else if (type == "text") {
      joined += (joined.empty() ? "" : "\n") + part.string("text").value_or("");
    } else if (type != "thinking" && type != "redacted_thinking") {
      part.refuse("type", "text, thinking, tool_use or tool_result");
    }
  }
  if (joined.empty() && calls.empty()) return;
  OrderedJson out = {{"role", role}, {"content", joined}};
  if (!calls.empty()) out["tool_calls"] = std::move(calls);
  into.push_back(std::move(out));
}

OrderedJson tools_of(const Fields& body) {
  OrderedJson out = OrderedJson::array();
  const OrderedJson* tools = body.find("tools");
  if (!tools) return out;
  if (!tools->is_array()) body.refuse("tools", "a list");
  for (const OrderedJson& tool : *tools) {
    if (!tool.is_object()) body.refuse_as("tools", "expected objects, one is " + shown_value(tool));
    const Fields fields(tool, "tools.");
    // Tools that Anthropic's own servers run have types of their own, and no schema.
    if (const std::string type = fields.string("type").value_or("custom"); type != "custom")
      fields.refuse("type", "custom: tools that a server runs are not here");
    if (!fields.find("input_schema")) fields.refuse("input_schema", "a JSON schema");
    OrderedJson function = {{"name", fields.string("name").value_or("")},
                            {"description", fields.string("description").value_or("")}};
    if (const OrderedJson* schema = fields.find("input_schema")) function["parameters"] = *schema;
    out.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return out;
}

// What of their request makes the prompt, as a chat request.
OrderedJson translated_prompt(const Fields& body) {
  OrderedJson out = OrderedJson::object();
  if (const OrderedJson* value = body.find("chat_template_kwargs")) out["chat_template_kwargs"] = *value;
  out["messages"] = OrderedJson::array();
  if (const OrderedJson* system = body.find("system"))
    out["messages"].push_back({{"role", "system"}, {"content", text_of(*system, "system")}});
  const OrderedJson* messages = body.find("messages");
  if (!messages || !messages->is_array()) body.refuse("messages", "a list");
  for (size_t i = 0; i < messages->size(); ++i)
    add_message(out["messages"], (*messages)[i], text("messages[{}]", i));
  if (OrderedJson tools = tools_of(body); !tools.empty()) out["tools"] = std::move(tools);
  if (const auto choice = body.object("tool_choice")) {
    const std::string type = choice->string("type").value_or("");
    if (type == "tool")
      out["tool_choice"] = {{"type", "function"},
                            {"function", {{"name", choice->string("name").value_or("")}}}};
    else
      out["tool_choice"] = type == "any" ? "required" : type;
    out["parallel_tool_calls"] = !choice->flag("disable_parallel_tool_use", false);
  }
  return out;
}

// Their request as a chat request.
OrderedJson translated(const OrderedJson& json) {
  const Fields body(json);
  if (!body.find("max_tokens")) body.refuse("max_tokens", "a number of tokens");
  OrderedJson out = translated_prompt(body);
  out["max_tokens"] = *body.find("max_tokens");
  for (const char* name : {"model", "temperature", "top_p", "top_k", "seed"})
    if (const OrderedJson* value = body.find(name)) out[name] = *value;
  if (const OrderedJson* stops = body.find("stop_sequences")) out["stop"] = *stops;
  return out;
}

class MessagesAnswer final : public Answer {
 public:
  MessagesAnswer(Service& service, Responder responder, bool stream, const ChatPlan& plan)
      : Answer(service, std::move(responder), stream, 1, 1),
        stops_(plan.requests.front().stop),
        parser_(plan.syntax, plan.start) {
    message_ = {{"id", random_id("msg_")},
                {"type", "message"},
                {"role", "assistant"},
                {"model", service.model_name(plan.requests.front().adapter)},
                {"content", OrderedJson::array()},
                {"stop_reason", nullptr},
                {"stop_sequence", nullptr},
                {"usage", {{"input_tokens", plan.requests.front().prompt.size()}, {"output_tokens", 0}}}};
  }

 private:
  void begin() override { send_named("message_start", {{"message", message_}}); }

  void event(size_t, const AnswerEvent& event) override {
    std::vector<ReplyPiece> pieces = parser_.push(event.text);
    if (event.finish)
      for (ReplyPiece& piece : parser_.flush(end_of(event.finish->reason)))
        pieces.push_back(std::move(piece));
    for (const ReplyPiece& piece : pieces) take_piece(piece);
    if (!event.finish) return;
    close_block();
    const Finish& finish = *event.finish;
    message_["stop_reason"] = finish.reason == FinishReason::kLength      ? "max_tokens"
                              : parser_.calls() > 0 && !parser_.cut_off() ? "tool_use"
                              : finish.stop                               ? "stop_sequence"
                                                                          : "end_turn";
    if (finish.stop) message_["stop_sequence"] = stops_[*finish.stop];
  }

  void end() override {
    // Tokens from the cache are counted apart.
    const OrderedJson usage = {{"input_tokens", this->usage().prompt_tokens - this->usage().cached_tokens},
                               {"output_tokens", this->usage().completion_tokens},
                               {"cache_read_input_tokens", this->usage().cached_tokens}};
    message_["usage"] = usage;
    if (!stream()) {
      for (OrderedJson& block : message_["content"])
        if (block.contains("input_text")) finish_tool(block);
      return reply(json_text(message_));
    }
    send_named(
        "message_delta",
        {{"delta", {{"stop_reason", message_["stop_reason"]}, {"stop_sequence", message_["stop_sequence"]}}},
         {"usage", usage}});
    send_named("message_stop", OrderedJson::object());
  }

  // Arguments were collected as text; a call that was cut off keeps what there is under "_partial".
  static void finish_tool(OrderedJson& block) {
    const std::string input = block["input_text"].get<std::string>();
    block.erase("input_text");
    try {
      block["input"] = parse_ordered_json(input, "input");
    } catch (const Error&) {
      block["input"] = {{"_partial", input}};
    }
  }

  void take_piece(const ReplyPiece& piece) {
    using Kind = ReplyPiece::Kind;
    if (piece.kind == Kind::kCall) {
      close_block();
      open_block(piece.kind, {{"type", "tool_use"},
                              {"id", piece.id.empty() ? random_id("toolu_") : piece.id},
                              {"name", piece.text},
                              {"input", OrderedJson::object()}});
      return;
    }
    if (open_ != piece.kind) {
      close_block();
      if (piece.kind == Kind::kReasoning)
        open_block(piece.kind, {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}});
      else
        open_block(piece.kind, {{"type", "text"}, {"text", ""}});
    }
    const char* type = piece.kind == Kind::kReasoning   ? "thinking_delta"
                       : piece.kind == Kind::kArguments ? "input_json_delta"
                                                        : "text_delta";
    const char* key = piece.kind == Kind::kReasoning   ? "thinking"
                      : piece.kind == Kind::kArguments ? "partial_json"
                                                       : "text";
    if (stream())
      return send_named("content_block_delta",
                        {{"index", blocks_ - 1}, {"delta", {{"type", type}, {key, piece.text}}}});
    OrderedJson& block = message_["content"].back();
    OrderedJson& into = block[piece.kind == Kind::kArguments ? "input_text" : key];
    if (into.is_string())
      into.get_ref<std::string&>() += piece.text;
    else
      into = piece.text;
  }

  void open_block(ReplyPiece::Kind kind, OrderedJson block) {
    // What follows a call's name are its arguments.
    open_ = kind == ReplyPiece::Kind::kCall ? ReplyPiece::Kind::kArguments : kind;
    ++blocks_;
    if (stream())
      send_named("content_block_start", {{"index", blocks_ - 1}, {"content_block", std::move(block)}});
    else
      message_["content"].push_back(std::move(block));
  }

  void close_block() {
    if (!open_) return;
    if (stream()) send_named("content_block_stop", {{"index", blocks_ - 1}});
    open_.reset();
  }

  void send_named(const char* name, const OrderedJson& data) const {
    if (!stream()) return;
    OrderedJson out = {{"type", name}};
    out.update(data);
    send(text("event: {}\ndata: {}\n\n", name, json_text(out)));
  }

  std::string stream_error(int status, const std::string& why) const override {
    return text("event: error\ndata: {}\n\n", messages_error_body(status, why));
  }
  HttpReply whole_error(int status, const std::string& why) const override {
    return {.status = status, .body = messages_error_body(status, why)};
  }

  const std::vector<std::string> stops_;
  ReplyParser parser_;
  OrderedJson message_;
  std::optional<ReplyPiece::Kind> open_;  // of the block that is being written
  int blocks_ = 0;
};

}  // namespace

void post_messages(Service& service, HttpRequest& request, const Responder& responder) {
  const OrderedJson body = parse_body(request);
  ChatPlan plan = plan_chat(service, translated(body));
  const bool stream = Fields(body).flag("stream", false);
  const auto answer = std::make_shared<MessagesAnswer>(service, responder, stream, plan);
  service.run(answer, std::move(plan.requests));
}

void post_count_tokens(Service& service, HttpRequest& request, const Responder& responder) {
  const OrderedJson body = parse_body(request);
  const ChatPlan plan = plan_chat(service, translated_prompt(Fields(body)));
  const OrderedJson out = {{"input_tokens", plan.requests.front().prompt.size()}};
  service.metrics().count_reply(200);
  responder.reply({.body = json_text(out)});
}

}  // namespace kt::inline server
