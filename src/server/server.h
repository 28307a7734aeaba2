// The server as a program runs it: the port first, the model later, so that a taken port is known before
// minutes of loading and clients that come early are told to wait.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "http/server.h"
#include "models/expert_use.h"
#include "server/access.h"
#include "server/service.h"

namespace kt::inline server {

struct ServerOptions {
  HttpServerOptions http = {};
  AccessOptions access = {};
  // A line for every request, without an end of line; on the server's thread, so it must be quick. See request_line.
  std::function<void(const std::string&)> log = {};
};

class Server {
 public:
  // Listens at once; until serve() every path but /health answers 503.
  explicit Server(const ServerOptions& options);
  ~Server();

  std::string url() const { return http_->url(); }
  bool reaches_other_machines() const { return http_->reaches_other_machines(); }
  void set_api_keys(std::vector<std::string> keys) { access_.set_keys(std::move(keys)); }
  // Once. The model must outlive this.
  void serve(LoadedModel& model, ServiceOptions options);
  // No new requests; true from drained() once every answer has been sent.
  void drain();
  bool drained() const;
  // By all that was served so far; none: nothing was, or no layer routes.
  std::optional<ExpertUse> experts_used() const;

 private:
  void handle(HttpRequest& request, const Responder& responder);
  void reply_to(HttpRequest& request, const Responder& responder);
  void answer(HttpRequest& request, const Responder& responder);
  void post(std::function<void()> call);

  Access access_;
  std::mutex post_mutex_;
  HttpServer* target_ = nullptr;  // under post_mutex_; null: calls are dropped
  std::unique_ptr<Service> service_;
  std::atomic<Service*> ready_ = nullptr;  // service_, once it is there
  std::unique_ptr<HttpServer> http_;       // last: its threads use the above
};

}  // namespace kt::inline server
