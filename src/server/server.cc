#include "server/server.h"

#include <array>
#include <ctime>

#include "base/error.h"
#include "base/log.h"
#include "server/api_error.h"
#include "server/endpoints.h"
#include "server/fields.h"
#include "server/page.h"
#include "server/request_log.h"

namespace kt::inline server {
namespace {

struct Endpoint {
  std::string_view method, path;
  void (*handle)(Service&, HttpRequest&, const Responder&);
};
constexpr auto kEndpoints = std::to_array<Endpoint>({
    {"POST", "/v1/chat/completions", post_chat_completions},
    {"POST", "/v1/completions", post_completions},
    {"POST", "/v1/responses", post_responses},
    {"POST", "/v1/messages", post_messages},
    {"POST", "/v1/messages/count_tokens", post_count_tokens},
    {"POST", "/v1/embeddings", post_embeddings},
    {"GET", "/v1/models", get_models},
    {"POST", "/tokenize", post_tokenize},
    {"POST", "/detokenize", post_detokenize},
    {"GET", "/kt/status", get_status},
    {"GET", "/metrics", get_metrics},
});

constexpr size_t kLargeBody = 1 << 20;

// What is answered from what is known waits for nothing that has to be computed, and what is quickly read does not wait
// for megabytes of text. Two of those at a time: each takes some ten times its size while it is read.
constexpr size_t kQuick = 0, kUsual = 1, kLarge = 2;
constexpr std::array<int, 3> kThreads = {2, 12, 2};

size_t lane_of(const HttpRequest& request) {
  if (request.method != "POST") return kQuick;
  return request.body.size() > kLargeBody ? kLarge : kUsual;
}

bool fits(const Endpoint& endpoint, std::string_view path) {
  if (endpoint.path == path) return true;
  return endpoint.handle == get_models && path.starts_with("/v1/models/");
}

HttpServerOptions http_options(const ServerOptions& options) {
  HttpServerOptions out = options.http;
  out.lanes.assign(kThreads.begin(), kThreads.end());
  out.lane_of = lane_of;
  if (options.log)
    out.on_done = [log = options.log](const HttpRecord& record) {
      log(request_line(record, std::time(nullptr)));
    };
  out.on_error = [](int status, const std::string& why) { return error_reply(status, why); };
  if (!options.access.allow_origin.empty())
    out.headers = std::make_shared<HttpHeaders>(
        HttpHeaders{{"Access-Control-Allow-Origin", options.access.allow_origin},
                    {"Access-Control-Allow-Methods", "GET, POST, OPTIONS"},
                    {"Vary", "Origin"}});
  return out;
}

// The name that the server listens on is its own.
AccessOptions access_options(const ServerOptions& options) {
  AccessOptions out = options.access;
  out.allow_hosts.push_back(options.http.host);
  return out;
}

}  // namespace

Server::Server(const ServerOptions& options) : access_(access_options(options)) {
  http_ = std::make_unique<HttpServer>(
      http_options(options),
      [this](HttpRequest& request, const Responder& responder) { handle(request, responder); });
  const std::lock_guard lock(post_mutex_);
  target_ = http_.get();
}

Server::~Server() {
  {
    const std::lock_guard lock(post_mutex_);
    target_ = nullptr;
  }
  http_.reset();
  service_.reset();
}

void Server::post(std::function<void()> call) {
  const std::lock_guard lock(post_mutex_);
  if (target_) target_->post(std::move(call));
}

void Server::serve(LoadedModel& model, ServiceOptions options) {
  // The pointer itself is gone first when this ends.
  options.connections = [http = http_.get()] { return http->connections(); };
  service_ = std::make_unique<Service>(model, std::move(options),
                                       [this](std::function<void()> call) { post(std::move(call)); });
  ready_ = service_.get();
}

void Server::drain() {
  if (Service* service = ready_) service->drain();
  http_->drain();
}

bool Server::drained() const {
  const Service* service = ready_;
  return (!service || service->idle()) && http_->drained();
}

std::optional<ExpertUse> Server::experts_used() const {
  const Service* service = ready_;
  const ExpertCounts* counts = service ? service->runner().expert_counts() : nullptr;
  if (!counts) return {};
  return expert_use(*counts);
}

void Server::handle(HttpRequest& request, const Responder& responder) {
  const bool large = request.body.size() > kLargeBody;
  reply_to(request, responder);
  if (!large) return;
  request = {};  // whatever was not read of it
  if (Service* service = ready_) service->trim_soon();
}

void Server::reply_to(HttpRequest& request, const Responder& responder) {
  int status = 500;
  HttpReply reply;
  try {
    return answer(request, responder);
  } catch (const ApiError& error) {
    status = error.status();
    reply = error_reply(status, error.what(), error.param());
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kMemory) status = 503;
    if (error.kind() == ErrorKind::kInput) status = 400;
    reply = error_reply(status, error.what());
  } catch (const std::bad_alloc&) {
    reply = error_reply(status = 503, "no memory for this request");
  } catch (const std::exception& error) {
    reply = error_reply(status, error.what());
  }
  if (request.path.starts_with("/v1/messages")) {
    const OrderedJson body = OrderedJson::parse(reply.body);
    reply.body = messages_error_body(status, body["error"]["message"].get_ref<const std::string&>());
  }
  if (status == 401)
    reply.headers.emplace_back("WWW-Authenticate", request.path == "/" ? "Basic realm=\"kt\"" : "Bearer");
  if (status == 500) KT_LOG(LogLevel::kError, "{} {}: {}", request.method, request.path, reply.body);
  if (Service* service = ready_) service->metrics().count_reply(status);
  responder.reply(reply);
}

void Server::answer(HttpRequest& request, const Responder& responder) {
  Service* service = ready_;
  if (request.path == "/health" || request.path == "/healthz") {
    if (!service) throw ApiError(503, "the model is being loaded");
    Service::check_model();
    return responder.reply({.body = "{\"status\":\"ok\"}"});
  }
  // A browser asks before it sends a key.
  if (request.method == "OPTIONS" && !access_.allow_origin().empty()) {
    access_.check_host(request);
    const std::string asked(request.header("access-control-request-headers").value_or(""));
    return responder.reply({.status = 204, .headers = {{"Access-Control-Allow-Headers", asked}}});
  }
  access_.check(request);
  const std::string_view method = request.method == "HEAD" ? "GET" : std::string_view(request.method);
  if (method == "GET")
    if (auto page = page_reply(request.path)) return responder.reply(*page);
  bool known = false;
  for (const Endpoint& endpoint : kEndpoints) {
    if (!fits(endpoint, request.path)) continue;
    known = true;
    if (endpoint.method != method) continue;
    if (!service) throw ApiError(503, "the model is being loaded; try again later");
    return endpoint.handle(*service, request, responder);
  }
  if (known) throw ApiError(405, text("{} is not for {}", request.path, request.method));
  throw ApiError(404, text("no such path: {} {}", request.method, shown_value(request.path)));
}

}  // namespace kt::inline server
