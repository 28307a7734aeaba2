// The server's thread: all sockets of an HttpServer, read, written, timed and closed. No handler runs on it.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "http/exchange.h"
#include "http/parser.h"
#include "http/server.h"
#include "http/socket.h"

namespace kt::inline http {

// Bytes that count in a sum while this lives.
class Share {
 public:
  Share() = default;
  explicit Share(std::shared_ptr<std::atomic<size_t>> sum) : sum_(std::move(sum)) {}
  Share(Share&& other) noexcept : sum_(std::move(other.sum_)), bytes_(std::exchange(other.bytes_, 0)) {}
  Share& operator=(Share&& other) noexcept {
    std::swap(sum_, other.sum_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Share() { set(0); }
  void set(size_t bytes) {
    if (sum_ && bytes != bytes_) *sum_ += bytes - bytes_;  // modulo 2^64
    bytes_ = bytes;
  }

 private:
  std::shared_ptr<std::atomic<size_t>> sum_;
  size_t bytes_ = 0;
};

// A whole request and the way to answer it.
struct HttpJob {
  HttpRequest request = {};
  Share share = {};
  std::shared_ptr<Exchange> exchange = {};
};

class IoLoop {
 public:
  // `dispatch` is called on the loop's thread and must not block.
  IoLoop(HttpServerOptions options, std::vector<Fd> listeners, std::function<void(HttpJob)> dispatch);
  ~IoLoop();

  void run();  // on its thread, until mailbox().stop(); then every connection is closed
  Mailbox& mailbox() { return *mailbox_; }

  // From any thread.
  void drain();
  bool drained() const { return drain_begun_ && busy_ == 0; }
  int connections() const { return connections_; }

 private:
  using Clock = std::chrono::steady_clock;
  enum class Phase {
    kReading,    // waits for a request, or is in the middle of one
    kRunning,    // has an exchange
    kFlushing,   // sends its last reply
    kLingering,  // has sent it; reads on, because a close with unread bytes would take the reply back
    kClosed,     // is freed at the end of the turn
  };
  struct Connection {
    uint64_t id;
    Fd socket;
    RequestParser parser;
    Share share;  // of bodies_
    Phase phase = Phase::kReading;
    std::string in = {};   // what came after the request that runs
    std::string out = {};  // bytes of the wire; from out_at on: not yet taken by the kernel
    size_t out_at = 0;
    std::shared_ptr<Exchange> exchange = {};
    bool reply_ended = false;              // all of the exchange's reply is in `out`
    bool reply_begun = false;              // some of it was
    bool continued = false;                // "100 Continue" was sent
    bool half_closed = false;              // the client sends no more; it may still read
    size_t thrown_away = 0;                // bytes, while lingering
    uint32_t interest = 0;                 // epoll's
    std::unique_ptr<TlsSession> tls = {};  // `out` is what it has sealed; null: plain
    bool greeted = false;                  // bytes of the handshake have come
    std::string refusal = {};              // what a client that came in vain is told once it can be
    Clock::time_point deadline = Clock::time_point::max();
    HttpRecord record = {};        // of the request that runs, where somebody wants it
    Clock::time_point since = {};  // its first byte
  };

  void turn();
  void run_mail();
  void close_all();
  int sleep_ms() const;
  void set_deadline(Connection& c, Clock::time_point when);
  void check_deadlines();
  void on_deadline(Connection& c);

  void watch_listeners(uint32_t events);
  void accept_all(int listener);
  void pause_accepting(int error);
  void adopt(Fd socket);

  void on_event(Connection& c, uint32_t events);
  void read_some(Connection& c);
  void take(Connection& c, std::string_view wire);
  bool take_tls(Connection& c, std::string_view wire);
  void on_half_close(Connection& c);
  void feed(Connection& c, std::string_view bytes);
  void begin_exchange(Connection& c, std::string_view rest);
  enum class Reply { kWhole, kCut };
  void end_exchange(Connection& c, Reply reply);
  void begin_record(Connection& c);
  void end_record(Connection& c, Reply reply);
  void pump(Connection& c);
  void put(Connection& c, std::string bytes);
  // An error as the last reply.
  void refuse(Connection& c, int status, const std::string& why);
  HttpReply error_reply(int status, const std::string& why) const;
  void flush(Connection& c);
  void on_flushed(Connection& c);
  void linger(Connection& c);
  static void say_end(Connection& c);
  void throw_away(Connection& c);
  void close(Connection& c);
  void free_closed();
  void set_interest(Connection& c, uint32_t wanted);
  void set_interest_of_phase(Connection& c);

  const HttpServerOptions options_;
  const HttpLimits limits_;
  const std::function<void(HttpJob)> dispatch_;
  const std::shared_ptr<Mailbox> mailbox_ = std::make_shared<Mailbox>();
  const std::shared_ptr<std::atomic<bool>> draining_ = std::make_shared<std::atomic<bool>>(false);
  const std::shared_ptr<std::atomic<size_t>> bodies_ = std::make_shared<std::atomic<size_t>>(0);
  std::atomic<bool> drain_begun_ = false;
  std::atomic<int> busy_ = 0, connections_ = 0;

  Fd epoll_;
  std::vector<Fd> listeners_;
  Clock::time_point accept_again_ = Clock::time_point::max();  // max: accepting
  Clock::time_point next_check_ = Clock::time_point::max();    // no deadline is earlier
  uint64_t next_id_;
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> all_;
  std::vector<uint64_t> closed_;
  std::vector<char> buffer_;
  std::string plain_;  // what bytes of the wire meant
};

}  // namespace kt::inline http
