// A chat's answers from a server with OpenAI's API, over server-sent events.
#include <atomic>
#include <chrono>
#include <exception>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/chat/chat_backend.h"
#include "cli/server_trust.h"
#include "http/client.h"
#include "terminal/language.h"
#include "terminal/terminal_text.h"
#include "text/json.h"

namespace kt::inline cli {
namespace {

using Clock = std::chrono::steady_clock;
using OrderedJson = nlohmann::ordered_json;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A member that is a string, or "".
std::string string_at(const Json& object, const char* key) {
  if (!object.is_object()) return "";
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

std::optional<int> number_at(const Json& object, const char* key) {
  if (!object.is_object()) return std::nullopt;
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number_integer()) return std::nullopt;
  return found->get<int>();
}

// What went wrong, in the server's words where it has some: OpenAI's {"error": {"message": ...}}, the
// shapes others use, or the beginning of the body.
std::string complaint(const std::string& body) {
  const Json parsed = Json::parse(body, nullptr, false);
  if (parsed.is_object()) {
    const auto error = parsed.find("error");
    std::string message = error == parsed.end() ? "" : string_at(*error, "message");
    for (const char* key : {"error", "message", "detail"})
      if (message.empty()) message = string_at(parsed, key);
    if (!message.empty()) return harmless_line(message);
  }
  return body.empty() ? "no reason given" : harmless_line(body);
}

std::string trimmed_url(std::string url) {
  while (url.ends_with('/')) url.pop_back();
  if (url.ends_with("/v1")) url.resize(url.size() - 3);  // as other clients spell it
  return url;
}

OrderedJson request_body(const std::string& model, const std::vector<ChatMessage>& messages,
                         const ChatOptions& options) {
  OrderedJson body = {{"model", model}, {"stream", true}, {"stream_options", {{"include_usage", true}}}};
  body["messages"] = OrderedJson::array();
  for (const ChatMessage& message : messages)
    body["messages"].push_back({{"role", message.role}, {"content", message.content}});
  if (options.temperature) body["temperature"] = *options.temperature;
  if (options.top_p) body["top_p"] = *options.top_p;
  if (options.top_k) body["top_k"] = *options.top_k;
  if (options.max_tokens) body["max_tokens"] = *options.max_tokens;
  if (options.seed) body["seed"] = *options.seed;
  return body;
}

// One answer, put together from the events of the stream.
class StreamedAnswer {
 public:
  StreamedAnswer(const std::string& where, const std::function<void(const ChatPiece&)>& on_piece)
      : where_(where), on_piece_(on_piece) {}

  void take(const std::string& data) {
    if (data == "[DONE]") {
      done_ = true;
      return;
    }
    const Json event = Json::parse(data, nullptr, false);
    if (!event.is_object())
      fail("{}: an event of the answer is no JSON object: {}", where_, harmless_line(data));
    if (event.contains("error")) fail("{}: {}", where_, complaint(data));
    if (const auto usage = event.find("usage"); usage != event.end()) take_usage(*usage);
    const auto choices = event.find("choices");
    if (choices == event.end() || !choices->is_array() || choices->empty()) return;
    const Json& choice = choices->front();
    if (const std::string reason = string_at(choice, "finish_reason"); !reason.empty())
      finish_.reason = reason;
    const auto delta = choice.is_object() ? choice.find("delta") : choice.end();
    if (delta == choice.end()) return;
    pass_on(string_at(*delta, "reasoning_content"), true);
    pass_on(string_at(*delta, "content"), false);
  }

  ChatFinish end(bool stopped) {
    if (stopped) finish_.reason = "cancelled";
    if (finish_.reason.empty() && !done_) fail("{}: the answer broke off", where_);
    finish_.seconds = seconds_since(start_);
    return finish_;
  }

 private:
  void pass_on(const std::string& text, bool reasoning) {
    if (text.empty()) return;
    if (!began_) finish_.seconds_to_first = seconds_since(start_);
    began_ = true;
    on_piece_({.text = text, .reasoning = reasoning});
  }

  void take_usage(const Json& usage) {
    if (!usage.is_object()) return;
    finish_.prompt_tokens = number_at(usage, "prompt_tokens");
    finish_.output_tokens = number_at(usage, "completion_tokens");
    if (const auto details = usage.find("prompt_tokens_details"); details != usage.end())
      finish_.cached_tokens = number_at(*details, "cached_tokens");
  }

  const std::string& where_;
  const std::function<void(const ChatPiece&)>& on_piece_;
  const Clock::time_point start_ = Clock::now();
  ChatFinish finish_;
  bool began_ = false, done_ = false;
};

class ServerBackend final : public ChatBackend {
 public:
  explicit ServerBackend(const ChatServer& server)
      : where_(trimmed_url(server.url)),
        key_(server.api_key),
        client_(parse_url(where_), {.trust = trust_of(server.ca_file)}) {
    place_ = {.model = server.model, .where = where_};
    ask_for_models();
  }

  ChatPlace place() const override { return place_; }

  void stop() noexcept override {
    stopped_.store(true);
    client_.cancel();
  }

  ChatFinish stream(const std::vector<ChatMessage>& messages, const ChatOptions& options,
                    const std::function<void(const ChatPiece&)>& on_piece) override {
    stopped_.store(false);
    HttpRequest request = request_to("POST", "/v1/chat/completions");
    request.headers.emplace_back("Content-Type", "application/json");
    request.headers.emplace_back("Accept", "text/event-stream");
    request.body = request_body(place_.model, messages, options)
                       .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    StreamedAnswer answer(where_, on_piece);
    SseReader events;
    std::exception_ptr thrown;  // kept until the client has closed the connection
    const auto on_data = [&](std::string_view piece) {
      try {
        for (const std::string& data : events.push(piece))
          if (!stopped_.load()) answer.take(data);
      } catch (...) {
        thrown = std::current_exception();
      }
      return !thrown && !stopped_.load();
    };
    try {
      const HttpReply reply = client_.stream(request, on_data);
      if (!stopped_.load()) check(reply);
    } catch (const Error&) {
      if (!stopped_.load()) throw;
    }
    if (thrown) std::rethrow_exception(thrown);
    return answer.end(stopped_.load());
  }

 private:
  HttpRequest request_to(const char* method, const char* path) const {
    HttpRequest request{.method = method, .path = path};
    if (!key_.empty()) request.headers.emplace_back("Authorization", "Bearer " + key_);
    return request;
  }

  void check(const HttpReply& reply) const {
    if (reply.status >= 200 && reply.status < 300) return;
    const std::string advice = reply.status == 401 && key_.empty() ? tr_now("; give --api-key") : "";
    fail("{}: {} {}: {}{}", where_, reply.status, reason_of(reply.status), complaint(reply.body), advice);
  }

  HttpReply list_of_models() {
    try {
      return client_.send(request_to("GET", "/v1/models"));
    } catch (const Error& error) {
      // There is a server, and nobody knows whose.
      if (std::string_view(error.what()).find("certificate") != std::string_view::npos) throw;
      fail_as(error.kind(), tr("{}; kt run MODEL starts a server, kt chat MODEL needs none"), error.what());
    }
  }

  // The name to send, and the context where the server tells it, as SGLang and vLLM do.
  void ask_for_models() {
    const HttpReply reply = list_of_models();
    check(reply);
    const Json parsed = Json::parse(reply.body, nullptr, false);
    const auto data = parsed.is_object() ? parsed.find("data") : parsed.end();
    if (data == parsed.end() || !data->is_array())
      fail("{}: expected a list of models at /v1/models", where_);
    for (const Json& model : *data) {
      const std::string id = string_at(model, "id");
      if (id.empty()) continue;
      if (place_.model.empty()) place_.model = id;
      if (id == place_.model) place_.context = number_at(model, "max_model_len");
    }
    if (place_.model.empty()) fail(tr("{}: the server names no model; give one with --model"), where_);
  }

  std::string where_, key_;
  HttpClient client_;
  ChatPlace place_;
  std::atomic<bool> stopped_ = false;
};

}  // namespace

std::unique_ptr<ChatBackend> server_backend(const ChatServer& server) {
  return std::make_unique<ServerBackend>(server);
}

}  // namespace kt::inline cli
