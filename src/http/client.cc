#include "http/client.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/error.h"
#include "http/encode.h"
#include "http/parser.h"
#include "http/socket.h"

namespace kt::inline http {
namespace {

// A reply that is collected whole; a stream has no end by itself.
constexpr HttpLimits kWhole{.head = 256 << 10, .body = size_t{1} << 30, .fields = 1000};
constexpr HttpLimits kStream{.head = 256 << 10, .body = SIZE_MAX, .fields = 1000};

int read_port(std::string_view digits, std::string_view url) {
  int port = 0;
  for (const char c : digits) {
    if (c < '0' || c > '9' || port > 65535)
      port = 1 << 20;
    else
      port = port * 10 + (c - '0');
  }
  if (digits.empty() || port < 1 || port > 65535)
    fail("\"{}\": expected a port from 1 to 65535, got \"{}\"", url, digits);
  return port;
}

}  // namespace

HttpUrl parse_url(std::string_view url) {
  std::string_view rest = url;
  HttpUrl out;
  if (const size_t scheme = rest.find("://"); scheme != std::string_view::npos) {
    out.secure = same_word(rest.substr(0, scheme), "https");
    if (!out.secure && !same_word(rest.substr(0, scheme), "http"))
      fail("\"{}\": expected http://host:port or https://host:port", url);
    if (out.secure) out.port = 443;
    rest.remove_prefix(scheme + 3);
  }
  const auto is_odd = [](char c) { return c <= ' ' || c >= 0x7f; };
  if (rest.find_first_of("?#@\\") != std::string_view::npos || std::ranges::any_of(rest, is_odd))
    fail("\"{}\": expected http://host:port/path and nothing else", url);
  const size_t slash = std::min(rest.find('/'), rest.size());
  out.path = rest.substr(slash);
  while (out.path.ends_with('/')) out.path.pop_back();
  rest = rest.substr(0, slash);
  size_t host_end = rest.find(':');
  if (rest.starts_with('[')) {
    const size_t bracket = rest.find(']');
    if (bracket == std::string_view::npos) fail("\"{}\": the bracket of the address is not closed", url);
    out.host = rest.substr(1, bracket - 1);
    host_end = bracket + 1;
    if (host_end < rest.size() && rest[host_end] != ':') fail("\"{}\": expected http://[host]:port", url);
  } else {
    out.host = rest.substr(0, host_end);
  }
  if (out.host.empty()) fail("\"{}\": expected http://host:port, there is no host", url);
  if (host_end < rest.size()) out.port = read_port(rest.substr(host_end + 1), url);
  return out;
}

struct HttpClient::State {
  using OnData = std::function<bool(std::string_view)>;
  // kStale: a connection kept from before was closed, and nothing of the reply had come.
  enum class End { kWhole, kStopped, kStale };

  using Clock = std::chrono::steady_clock;

  State(HttpUrl to, HttpClientOptions with)
      : url(std::move(to)),
        options(std::move(with)),
        trust(url.secure && !options.trust ? std::make_shared<TlsTrust>() : options.trust),
        cancel_event(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (!cancel_event) fail_as(ErrorKind::kUnsupported, "eventfd: {}", error_name(errno));
  }

  std::string name() const {
    return (url.secure ? "https://" : "http://") + address_text(url.host, url.port);
  }
  HttpReply call(const HttpRequest& request, const OnData* on_data);
  bool open();
  bool shake_hands();
  void close();
  End talk(std::string_view bytes, ReplyReader& reader, std::string& body, const OnData* on_data);
  short wait(short events, std::chrono::milliseconds most);
  bool write_some(std::string_view& bytes);
  bool read_some(ReplyReader& reader, std::string& body);
  void end_of_connection(ReplyReader& reader) const;

  const HttpUrl url;
  const HttpClientOptions options;
  const std::shared_ptr<const TlsTrust> trust;
  const Fd cancel_event;
  Fd socket;
  std::unique_ptr<TlsSession> tls;  // on the socket; null: none
  std::string sealed;               // what goes over the wire with it
  std::string plain;                // what came over it
  bool kept = false;                // the socket has served a request already
  bool answered = false;            // bytes of the reply that is waited for have come
  bool excess = false;              // and more than the reply
};

HttpReply HttpClient::State::call(const HttpRequest& request, const OnData* on_data) {
  uint64_t old = 0;
  while (read(cancel_event.get(), &old, sizeof old) > 0) {
  }
  const std::string host = address_text(url.host, url.port);
  const std::string bytes = encode_request(request, url.path + request.path, host);
  while (true) {
    if (!open()) return {.status = 0, .type = {}};
    ReplyReader reader(on_data != nullptr ? kStream : kWhole, request.method);
    std::string body;
    End end = End::kStopped;
    try {
      end = talk(bytes, reader, body, on_data);
    } catch (...) {
      close();  // the rest of the reply would be read as the next one
      throw;
    }
    kept = end == End::kWhole && reader.keep_alive() && !excess;
    if (!kept) close();
    if (end == End::kStale) continue;
    using Stage = ReplyReader::Stage;
    const bool has_head = reader.stage() == Stage::kBody || reader.stage() == Stage::kDone;
    HttpReply reply = has_head ? reader.reply() : HttpReply{.status = 0, .type = {}};
    reply.body = std::move(body);
    return reply;
  }
}

// False if it was cancelled.
bool HttpClient::State::open() {
  if (socket) {
    // Anything to read now, before a request, is the end of the connection or the beginning of nonsense.
    pollfd look{socket.get(), POLLIN | POLLRDHUP, 0};
    if (poll(&look, 1, 0) == 0) return true;
    close();
  }
  kept = false;
  try {
    socket = connect_to(url.host, url.port, options.connect_timeout, cancel_event.get());
  } catch (const Error& e) {
    fail("{}: {}", name(), e.what());
  }
  if (!socket || !url.secure) return static_cast<bool>(socket);
  try {
    tls = trust->session(url.host);
    if (shake_hands()) return true;
  } catch (...) {
    close();
    throw;
  }
  close();
  return false;
}

// False if it was cancelled.
bool HttpClient::State::shake_hands() {
  const Clock::time_point deadline = Clock::now() + options.connect_timeout;
  sealed.clear();
  plain.clear();
  tls->receive({}, plain, sealed);
  std::string_view bytes = sealed;
  while (!tls->open()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0)
      fail("{}: no TLS connection within {} ms", name(), options.connect_timeout.count());
    const short ready = wait(bytes.empty() ? POLLIN : POLLIN | POLLOUT, left);
    if (ready == 0) return false;
    if (ready & POLLOUT && !bytes.empty() && !write_some(bytes)) bytes = {};
    if (!(ready & ~POLLOUT)) continue;
    std::array<char, 16 << 10> buffer;
    const ssize_t n = recv(socket.get(), buffer.data(), buffer.size(), 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) fail("{}: the connection was closed in the middle of the TLS handshake", name());
    std::string more(bytes);
    tls->receive({buffer.data(), static_cast<size_t>(n)}, plain, more);
    sealed = std::move(more);
    bytes = sealed;
    if (tls->failure().empty()) continue;
    write_some(bytes);  // an alert: the server may want to know
    fail("{}: {}", name(), tls->failure());
  }
  while (!bytes.empty()) {  // the last of the handshake
    if (wait(POLLOUT, options.connect_timeout) == 0) return false;
    if (!write_some(bytes)) break;
  }
  return true;
}

void HttpClient::State::close() {
  if (tls && socket) {
    std::string wire;
    tls->end(wire);
    if (!wire.empty()) ::send(socket.get(), wire.data(), wire.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  tls.reset();
  socket.reset();
}

HttpClient::State::End HttpClient::State::talk(std::string_view bytes, ReplyReader& reader, std::string& body,
                                               const OnData* on_data) {
  using Stage = ReplyReader::Stage;
  answered = excess = false;
  bool broken = false;
  sealed.clear();
  if (tls) {
    tls->seal(bytes, sealed);
    bytes = sealed;
  }
  while (true) {
    const short ready = wait(bytes.empty() || broken ? POLLIN : POLLIN | POLLOUT, options.read_timeout);
    if (ready == 0) return End::kStopped;
    // A server may refuse a request before it has read all of it; its reply counts, not the failed write.
    if (ready & POLLOUT && !bytes.empty() && !write_some(bytes)) broken = true;
    if (!(ready & ~POLLOUT)) continue;
    const size_t to_send = bytes.size(), before = sealed.size();
    if (!read_some(reader, body) && !answered && kept) return End::kStale;
    if (tls && sealed.size() > before) {  // TLS has an answer of its own to what came
      sealed.erase(0, before - to_send);
      bytes = sealed;
    }
    if (reader.stage() == Stage::kFailed) fail("{}: {}", name(), reader.failure().why);
    const bool in_pieces =
        on_data != nullptr && reader.reply().status / 100 == 2 && reader.stage() != Stage::kHead;
    if (in_pieces && !body.empty()) {
      const bool goes_on = (*on_data)(body);
      body.clear();
      if (!goes_on) return End::kStopped;
    }
    if (reader.stage() != Stage::kDone) continue;
    return bytes.empty() ? End::kWhole : End::kStopped;
  }
}

// What of `events` the socket is ready for; 0 if the call was cancelled.
short HttpClient::State::wait(short events, std::chrono::milliseconds most) {
  std::array<pollfd, 2> both = {pollfd{socket.get(), events, 0}, pollfd{cancel_event.get(), POLLIN, 0}};
  const auto timeout = std::min<int64_t>(most.count(), 1 << 30);
  while (true) {
    const int n = poll(both.data(), both.size(), static_cast<int>(timeout));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("{}: {}", name(), error_name(errno));
    if (n == 0) fail("{}: no answer within {} ms", name(), most.count());
    if (both[1].revents != 0) return 0;
    return both[0].revents;
  }
}

// False if the connection takes nothing any more.
bool HttpClient::State::write_some(std::string_view& bytes) {
  const ssize_t n = ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (n > 0) bytes.remove_prefix(static_cast<size_t>(n));
  return n > 0 || errno == EAGAIN || errno == EINTR;
}

// False if the connection ended.
bool HttpClient::State::read_some(ReplyReader& reader, std::string& body) {
  std::array<char, 32 << 10> buffer;
  const ssize_t n = recv(socket.get(), buffer.data(), buffer.size(), 0);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (n <= 0) {
    end_of_connection(reader);
    return false;
  }
  std::string_view bytes(buffer.data(), static_cast<size_t>(n));
  if (tls) {
    plain.clear();
    tls->receive(bytes, plain, sealed);
    if (!tls->failure().empty()) fail("{}: {}", name(), tls->failure());
    bytes = plain;
  }
  answered = answered || !bytes.empty();
  reader.push(bytes, body);
  excess = !bytes.empty();
  if (!tls || !tls->ended() || reader.stage() == ReplyReader::Stage::kDone) return true;
  end_of_connection(reader);
  return false;
}

// A body that ends with its connection is whole only if TLS says that this is its end: anyone may cut a connection.
void HttpClient::State::end_of_connection(ReplyReader& reader) const {
  const bool was_done = reader.stage() == ReplyReader::Stage::kDone;
  reader.close();
  if (tls && !tls->ended() && !was_done && reader.stage() == ReplyReader::Stage::kDone)
    fail("{}: the connection was cut in the middle of a reply", name());
}

HttpClient::HttpClient(HttpUrl url, HttpClientOptions options)
    : state_(std::make_unique<State>(std::move(url), std::move(options))) {}
HttpClient::~HttpClient() = default;
HttpClient::HttpClient(HttpClient&&) noexcept = default;

HttpReply HttpClient::send(const HttpRequest& request) { return state_->call(request, nullptr); }

HttpReply HttpClient::stream(const HttpRequest& request,
                             const std::function<bool(std::string_view)>& on_data) {
  return state_->call(request, &on_data);
}

void HttpClient::cancel() noexcept {
  const int before = errno;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(state_->cancel_event.get(), &one, sizeof one);
  errno = before;
}

}  // namespace kt::inline http
