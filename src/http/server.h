// An HTTP/1.1 server over TCP, or over TLS on it: one thread reads and writes all sockets, a few others run the
// handlers. Knows nothing of what is served. Whatever bytes come, a client gets a reply or a closed connection, and
// nobody else notices.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "http/message.h"
#include "http/tls.h"

namespace kt::inline http {

// One request and what became of it.
struct HttpRecord {
  std::string client = {};             // "127.0.0.1:51234"
  std::string method = {}, path = {};  // "": nothing that could be read
  int status = 0;                      // 0: none was sent
  bool whole = false;                  // the reply was; else the client went, or it was cut off
  double seconds = 0;                  // from the request's first byte to the reply's last
  std::string note = {};               // Responder::note
};

struct HttpServerOptions {
  std::string host = "127.0.0.1";             // a name or an address, IPv4 or IPv6
  int port = 0;                               // 0: any free one
  std::shared_ptr<const TlsServer> tls = {};  // https; empty: http
  // Threads that run handlers, lane by lane: a request waits for those of its own lane alone.
  std::vector<int> lanes = {2};
  // Which lane a request takes, below lanes.size(). On the server's thread: quick, and it must not throw. Empty: the
  // first.
  std::function<size_t(const HttpRequest&)> lane_of = {};
  size_t max_head = 32 << 10;     // bytes of request line and headers; 431 beyond
  size_t max_body = 16 << 20;     // 413 beyond
  size_t max_bodies = 256 << 20;  // of all requests that arrive or are handled at a time; 503 beyond
  int max_connections = 1024;     // 503 beyond
  // A request must have arrived whole so long after its first byte (408), and so must a TLS handshake (closed); a
  // stalled client must take some of what waits for it within write_timeout (closed), an idle connection is closed
  // after idle_timeout.
  std::chrono::milliseconds request_timeout{30'000}, write_timeout{30'000}, idle_timeout{75'000};
  std::shared_ptr<const HttpHeaders> headers = {};      // sent with every reply
  size_t max_unsent = 8 << 20;                          // bytes that wait for a slow client; closed beyond
  std::function<void(const HttpRecord&)> on_done = {};  // of every request, on the server's thread: quick
  // Writes the body of a reply that the server itself makes (400, 404 of the parser, 408, 413, 431, 503).
  std::function<HttpReply(int status, const std::string& why)> on_error = {};
};

// The answer to one request: a handle, cheap to copy, used from any thread. No call blocks; calls after the
// client is gone, or after the end, do nothing. If the last copy goes without a reply, the client gets 500;
// if it goes in the middle of a stream, the connection is closed without the final chunk.
class Responder {
 public:
  struct State;
  explicit Responder(std::shared_ptr<State> state);

  void reply(const HttpReply& reply) const;
  // A body that comes in pieces (Transfer-Encoding: chunked; until close for HTTP/1.0). `head.body` is its
  // first piece.
  void start(const HttpReply& head) const;
  void send(const std::string& piece) const;
  void end() const;
  void note(std::string remark) const;  // for HttpRecord; the last one counts
  bool gone() const;                    // the client closed the connection, or it was closed on it
  // Called at most once, on the server's thread, when the client goes before the end; at once, on this
  // thread, if it is gone.
  void on_gone(std::function<void()> call) const;

 private:
  std::shared_ptr<State> state_;
};

class HttpServer {
 public:
  // Called on a handler thread. The request is the handler's to take apart, so that a large body need not live until
  // its end. An exception becomes 500 with on_error's body if nothing was sent yet.
  using Handler = std::function<void(HttpRequest&, Responder)>;

  // Binds, listens and serves at once. Error(kInput) "127.0.0.1:30000: address already in use; ...".
  HttpServer(const HttpServerOptions& options, Handler handler);
  // Closes everything and waits for handlers that run.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const;
  std::string url() const;              // "http://127.0.0.1:30000"; https with TLS
  bool reaches_other_machines() const;  // it listens on more than loopback
  // Runs `call` on the server's thread, in order. From any thread; cheap: the thread is woken once for all
  // that was posted meanwhile.
  void post(std::function<void()> call);
  // No new connections or requests (503, Connection: close); what runs goes on. False from drained() until
  // every reply has been sent.
  void drain();
  bool drained() const;
  int connections() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kt::inline http
