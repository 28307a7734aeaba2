// A server with a few routes for tests, and the clients to try it with.
#pragma once
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "http/client.h"
#include "http/server.h"
#include "http/test_socket.h"

namespace kt::inline http {

inline constexpr std::string_view kHello = "GET /hello HTTP/1.1\r\nHost: a\r\n\r\n";

// /hello, /echo (the body), /big?n (n bytes), /throw, /drop, /stream?n (n pieces from another thread),
// /hold (answered by `held`), /wait (its handler waits for `released`).
class HttpServerTest : public testing::Test {
 protected:
  ~HttpServerTest() override {
    server.reset();
    for (std::thread& t : threads) t.join();
  }

  void start(HttpServerOptions options = {}) {
    server = std::make_unique<HttpServer>(
        std::move(options), [this](const HttpRequest& request, Responder to) { answer(request, to); });
  }

  void answer(const HttpRequest& request, const Responder& to) {
    ++requests;
    if (request.path == "/hello") return to.reply({.type = "text/plain", .body = "hello"});
    if (request.path == "/echo") return to.reply({.body = request.body});
    if (request.path == "/big") return to.reply({.body = std::string(std::stoul(request.query), 'b')});
    if (request.path == "/throw") fail("thrown on purpose");
    if (request.path == "/late") {
      to.start({.body = "begun"});
      fail("thrown in the middle");
    }
    if (request.path == "/drop") return;
    if (request.path == "/stream") return stream(to, std::stoi(request.query));
    if (request.path == "/hold") return hold(to);
    if (request.path == "/wait") {
      wait_for([&] { return released || to.gone(); });
      return to.reply({});
    }
    to.reply({.status = 404, .body = request.method + " " + request.path});
  }

  void stream(const Responder& to, int pieces) {
    const std::lock_guard lock(mutex);
    threads.emplace_back([to, pieces] {
      to.start({.type = "text/event-stream"});
      for (int i = 0; i < pieces && !to.gone(); ++i) to.send("data: " + std::to_string(i) + "\n\n");
      to.end();
    });
  }

  void hold(const Responder& to) {
    to.on_gone([this] { ++gone; });
    const std::lock_guard lock(mutex);
    held.push_back(to);
    ++holding;
  }

  template <typename Condition>
  bool wait_for(Condition condition, std::chrono::milliseconds limit = std::chrono::minutes(5)) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!condition()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  HttpClient client() { return HttpClient(parse_url(server->url())); }
  TestSocket raw() { return TestSocket(server->port()); }

  std::atomic<bool> released = false;
  std::atomic<int> requests = 0, gone = 0, holding = 0;
  std::mutex mutex;
  std::vector<std::thread> threads;
  std::vector<Responder> held;
  std::unique_ptr<HttpServer> server;
};

}  // namespace kt::inline http
