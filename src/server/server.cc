#include "server/server.h"

#include <array>

#include "base/error.h"
#include "base/log.h"
#include "server/api_error.h"
#include "server/endpoints.h"
#include "server/fields.h"
#include "server/page.h"

namespace kt {
namespace {

struct Endpoint {
  std::string_view method, path;
  void (*handle)(Service&, const HttpRequest&, Responder);
};
constexpr auto kEndpoints = std::to_array<Endpoint>({
    {"POST", "/v1/chat/completions", post_chat_completions},
    {"POST", "/v1/completions", post_completions},
    {"POST", "/v1/messages", post_messages},
    {"POST", "/v1/embeddings", post_embeddings},
    {"GET", "/v1/models", get_models},
    {"POST", "/tokenize", post_tokenize},
    {"POST", "/detokenize", post_detokenize},
    {"GET", "/kt/status", get_status},
    {"GET", "/metrics", get_metrics},
});

constexpr size_t kLargeBody = 1 << 20;

bool fits(const Endpoint& endpoint, std::string_view path) {
  if (endpoint.path == path) return true;
  return endpoint.handle == get_models && path.starts_with("/v1/models/");
}

// Takes as long for every key of one length.
bool same_key(std::string_view given, std::string_view key) {
  unsigned char difference = given.size() != key.size();
  for (size_t i = 0; i < key.size(); ++i)
    difference |= static_cast<unsigned char>((i < given.size() ? given[i] : '\0') ^ key[i]);
  return difference == 0;
}

// What follows "Bearer " or the like, whatever its case.
std::optional<std::string_view> credentials(std::string_view value, std::string_view scheme) {
  if (value.size() <= scheme.size() || value[scheme.size()] != ' ') return std::nullopt;
  for (size_t i = 0; i < scheme.size(); ++i)
    if ((value[i] | 0x20) != (scheme[i] | 0x20)) return std::nullopt;
  return value.substr(scheme.size() + 1);
}

std::string from_base64(std::string_view letters) {
  std::string out;
  uint32_t bits = 0;
  int count = 0;
  for (char letter : letters) {
    constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const size_t value = kAlphabet.find(letter);
    if (value == kAlphabet.npos) break;
    bits = bits << 6 | static_cast<uint32_t>(value);
    if ((count += 6) < 8) continue;
    count -= 8;
    out += static_cast<char>(bits >> count & 0xFF);
  }
  return out;
}

// Bearer for programs; Basic with any name and the key as the password for browsers, which ask for it when
// they open the page; x-api-key for Anthropic's clients.
std::string key_of(const HttpRequest& request) {
  if (const auto key = request.header("x-api-key")) return std::string(*key);
  const std::string_view value = request.header("authorization").value_or("");
  if (const auto key = credentials(value, "Bearer")) return std::string(*key);
  if (const auto pair = credentials(value, "Basic")) {
    const std::string decoded = from_base64(*pair);
    const size_t colon = decoded.find(':');
    return colon == decoded.npos ? decoded : decoded.substr(colon + 1);
  }
  return {};
}

bool names_loopback(std::string_view host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

// "localhost" or an address, with or without a port.
bool is_local_name(std::string_view host) {
  if (host.starts_with('[')) return true;
  host = host.substr(0, host.find(':'));
  return host == "localhost" || host.find_first_not_of("0123456789.") == host.npos;
}

HttpServerOptions http_options(const ServerOptions& options) {
  HttpServerOptions out = options.http;
  // Many, so that a few that read megabytes of text do not keep a small request waiting.
  out.handlers = std::max(out.handlers, 16);
  out.on_error = [](int status, const std::string& why) { return error_reply(status, why); };
  if (!options.allow_origin.empty())
    out.headers =
        std::make_shared<HttpHeaders>(HttpHeaders{{"Access-Control-Allow-Origin", options.allow_origin},
                                                  {"Access-Control-Allow-Methods", "GET, POST, OPTIONS"},
                                                  {"Vary", "Origin"}});
  return out;
}

}  // namespace

Server::Server(ServerOptions options) : options_(std::move(options)) {
  http_ = std::make_unique<HttpServer>(
      http_options(options_),
      [this](const HttpRequest& request, Responder responder) { handle(request, responder); });
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

void Server::check_access(const HttpRequest& request) const {
  if (!options_.api_key.empty() && !same_key(key_of(request), options_.api_key))
    throw ApiError(401, "the API key is missing or wrong; send Authorization: Bearer KEY");
  // A page of another origin must not use what runs on this machine behind its user's back.
  const auto origin = request.header("origin");
  if (!origin || options_.allow_origin == "*" || *origin == options_.allow_origin) return;
  const std::string_view host = request.header("host").value_or("");
  // A name that an attacker made point to this machine is an origin of its own too.
  if (names_loopback(options_.http.host) && !is_local_name(host))
    throw ApiError(403, text("pages of {} may not use this server: it allows its own alone, or the origin it "
                             "was started with (allow_origin)",
                             *origin));
  if (*origin != text("http://{}", host) && *origin != text("https://{}", host))
    throw ApiError(403, text("pages of {} may not use this server: it allows its own alone, or the origin it "
                             "was started with (allow_origin)",
                             *origin));
}

void Server::handle(const HttpRequest& request, const Responder& responder) {
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
  if (request.path == "/v1/messages") {
    const OrderedJson body = OrderedJson::parse(reply.body);
    reply.body = messages_error_body(status, body["error"]["message"].get_ref<const std::string&>());
  }
  if (status == 401)
    reply.headers.emplace_back("WWW-Authenticate", request.path == "/" ? "Basic realm=\"kt\"" : "Bearer");
  if (status == 500) KT_LOG(LogLevel::kError, "{} {}: {}", request.method, request.path, reply.body);
  if (Service* service = ready_) service->metrics().count_reply(status);
  responder.reply(std::move(reply));
}

void Server::answer(const HttpRequest& request, const Responder& responder) {
  Service* service = ready_;
  if (request.path == "/health" || request.path == "/healthz") {
    if (!service) throw ApiError(503, "the model is being loaded");
    Service::check_model();
    return responder.reply({.body = "{\"status\":\"ok\"}"});
  }
  // A browser asks before it sends a key.
  if (request.method == "OPTIONS" && !options_.allow_origin.empty()) {
    const std::string asked(request.header("access-control-request-headers").value_or(""));
    return responder.reply({.status = 204, .headers = {{"Access-Control-Allow-Headers", asked}}});
  }
  check_access(request);
  const std::string_view method = request.method == "HEAD" ? "GET" : std::string_view(request.method);
  if (method == "GET")
    if (auto page = page_reply(request.path)) return responder.reply(std::move(*page));
  bool known = false;
  for (const Endpoint& endpoint : kEndpoints) {
    if (!fits(endpoint, request.path)) continue;
    known = true;
    if (endpoint.method != method) continue;
    if (!service) throw ApiError(503, "the model is being loaded; try again later");
    endpoint.handle(*service, request, responder);
    if (request.body.size() > kLargeBody) service->trim_soon();
    return;
  }
  if (known) throw ApiError(405, text("{} is not for {}", request.path, request.method));
  throw ApiError(404, text("no such path: {} {}", request.method, shown_value(request.path)));
}

}  // namespace kt
