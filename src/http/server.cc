#include "http/server.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/error.h"
#include "http/exchange.h"
#include "http/io_loop.h"
#include "http/socket.h"

namespace kt::inline http {

struct HttpServer::State {
  State(const HttpServerOptions& options, Listeners listeners, Handler call)
      : host(options.host),
        port(listeners.port),
        only_loopback(listeners.only_loopback),
        scheme(options.tls ? "https://" : "http://"),
        handler(std::move(call)),
        lane_of(options.lane_of),
        lanes(std::max<size_t>(options.lanes.size(), 1)),
        loop(options, std::move(listeners.sockets), [this](HttpJob job) { add(std::move(job)); }) {
    try {
      threads.emplace_back([this] { loop.run(); });
      for (size_t lane = 0; lane < lanes.size(); ++lane)
        for (int i = 0; i < std::max(lane < options.lanes.size() ? options.lanes[lane] : 1, 1); ++i)
          threads.emplace_back([this, lane] { run_handlers(lanes[lane]); });
    } catch (const std::system_error& e) {
      stop();
      fail_as(ErrorKind::kMemory, "cannot start the threads of the server: {}", e.what());
    }
  }
  ~State() { stop(); }

  // The loop's thread goes first: it tells everyone that their clients are gone, and handlers may wait for
  // that.
  void stop() {
    if (threads.empty()) return;
    loop.mailbox().stop();
    threads.front().join();
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    for (Lane& lane : lanes) lane.awake.notify_all();
    for (size_t i = 1; i < threads.size(); ++i) threads[i].join();
  }

  struct Lane {
    std::condition_variable awake;
    std::deque<HttpJob> jobs;  // under mutex
  };

  void add(HttpJob job) {
    Lane& lane = lanes[lane_of ? std::min(lane_of(job.request), lanes.size() - 1) : 0];
    {
      const std::lock_guard lock(mutex);
      lane.jobs.push_back(std::move(job));
    }
    lane.awake.notify_one();
  }

  void run_handlers(Lane& lane) {
    while (true) {
      std::unique_lock lock(mutex);
      lane.awake.wait(lock, [&] { return stopping || !lane.jobs.empty(); });
      if (stopping) return;
      HttpJob job = std::move(lane.jobs.front());
      lane.jobs.pop_front();
      lock.unlock();
      if (!job.exchange->gone()) handle(job);
    }
  }

  void handle(HttpJob& job) const {
    const Responder responder(std::make_shared<Responder::State>(job.exchange));
    try {
      handler(job.request, responder);
    } catch (const std::exception& e) {
      job.exchange->fail(e.what());
    } catch (...) {
      job.exchange->fail("the handler failed");
    }
  }

  const std::string host;
  const int port;
  const bool only_loopback;
  const std::string scheme;
  const Handler handler;
  const std::function<size_t(const HttpRequest&)> lane_of;
  std::mutex mutex;
  std::vector<Lane> lanes;
  bool stopping = false;  // under mutex
  IoLoop loop;
  std::vector<std::thread> threads;  // the loop's, then the handlers'
};

HttpServer::HttpServer(const HttpServerOptions& options, Handler handler) {
  Listeners listeners = listen_on(options.host, options.port);
  state_ = std::make_unique<State>(options, std::move(listeners), std::move(handler));
}

HttpServer::~HttpServer() = default;

int HttpServer::port() const { return state_->port; }

bool HttpServer::reaches_other_machines() const { return !state_->only_loopback; }

std::string HttpServer::url() const {
  return state_->scheme + address_text(state_->host.empty() ? "127.0.0.1" : state_->host, state_->port);
}

void HttpServer::post(std::function<void()> call) { state_->loop.mailbox().post(std::move(call)); }
void HttpServer::drain() { state_->loop.drain(); }
bool HttpServer::drained() const { return state_->loop.drained(); }
int HttpServer::connections() const { return state_->loop.connections(); }

}  // namespace kt::inline http
