// A small HTTP/1.1 client over TCP or TLS, for talking to a server of ours or like it. No redirects, no proxies.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "http/message.h"
#include "http/tls.h"

namespace kt::inline http {

struct HttpUrl {
  std::string host;
  int port = 80;
  std::string path;     // without a slash at the end; "" for none
  bool secure = false;  // https
};
// "http://host:port/path", "https://...", "host:port". Error(kInput) naming the text.
HttpUrl parse_url(std::string_view url);

struct HttpClientOptions {
  std::chrono::milliseconds connect_timeout{5'000},
      read_timeout{600'000};                   // the first also for a TLS handshake
  std::shared_ptr<const TlsTrust> trust = {};  // for https; empty: the system's
};

// One connection, kept open between requests and opened again when the server closed it. One thread at a
// time, but for cancel().
class HttpClient {
 public:
  // Error(kUnsupported) for https in a build without TLS.
  explicit HttpClient(HttpUrl url, HttpClientOptions options = {});
  ~HttpClient();
  HttpClient(HttpClient&&) noexcept;

  // request.path is appended to the URL's. Error(kInput) in one line if there is no server, it goes away, cannot show
  // a certificate for its name, or does not speak HTTP. A status that is not 2xx is no error.
  HttpReply send(const HttpRequest& request);
  // The same, with the body in pieces as they come; reply.body is empty then if the status is 2xx. on_data
  // returning false closes the connection and ends the call.
  HttpReply stream(const HttpRequest& request, const std::function<bool(std::string_view)>& on_data);
  // From another thread or a signal handler: ends the call that runs, as if on_data had returned false.
  void cancel() noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Server-sent events out of a body that comes in pieces: the data of each event, lines joined by '\n'.
class SseReader {
 public:
  std::vector<std::string> push(std::string_view piece);

 private:
  std::string line_, data_;
  bool has_data_ = false, after_return_ = false;
};

}  // namespace kt::inline http
