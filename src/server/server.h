// The server as a program runs it: the port first, the model later, so that a taken port is known before
// minutes of loading and clients that come early are told to wait.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "http/server.h"
#include "server/service.h"

namespace kt {

struct ServerOptions {
  HttpServerOptions http = {};
  std::string api_key = {};  // "": none is asked for
  std::string allow_origin =
      {};  // pages of this origin, or "*", may use the API from a browser; "": our own only
};

class Server {
 public:
  // Listens at once; until serve() every path but /health answers 503.
  explicit Server(ServerOptions options);
  ~Server();

  std::string url() const { return http_->url(); }
  // Once. The model must outlive this.
  void serve(LoadedModel& model, ServiceOptions options);
  // No new requests; true from drained() once every answer has been sent.
  void drain();
  bool drained() const;

 private:
  void handle(const HttpRequest& request, const Responder& responder);
  void answer(const HttpRequest& request, const Responder& responder);
  void check_access(const HttpRequest& request) const;
  void post(std::function<void()> call);

  const ServerOptions options_;
  std::mutex post_mutex_;
  HttpServer* target_ = nullptr;  // under post_mutex_; null: calls are dropped
  std::unique_ptr<Service> service_;
  std::atomic<Service*> ready_ = nullptr;  // service_, once it is there
  std::unique_ptr<HttpServer> http_;       // last: its threads use the above
};

}  // namespace kt
