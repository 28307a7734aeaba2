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

namespace kt {
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
  if (const size_t scheme = rest.find("://"); scheme != std::string_view::npos) {
    if (same_word(rest.substr(0, scheme), "https"))
      fail("\"{}\": https is not supported; expected http://host:port", url);
    if (!same_word(rest.substr(0, scheme), "http")) fail("\"{}\": expected http://host:port", url);
    rest.remove_prefix(scheme + 3);
  }
  const auto is_odd = [](char c) { return c <= ' ' || c >= 0x7f; };
  if (rest.find_first_of("?#@\\") != std::string_view::npos || std::ranges::any_of(rest, is_odd))
    fail("\"{}\": expected http://host:port/path and nothing else", url);
  HttpUrl out;
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

  State(HttpUrl to, HttpClientOptions with)
      : url(std::move(to)), options(with), cancel_event(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (!cancel_event) fail_as(ErrorKind::kUnsupported, "eventfd: {}", error_name(errno));
  }

  std::string name() const { return "http://" + address_text(url.host, url.port); }
  HttpReply call(const HttpRequest& request, const OnData* on_data);
  bool open();
  End talk(std::string_view bytes, ReplyReader& reader, std::string& body, const OnData* on_data);
  short wait(short events);
  bool write_some(std::string_view& bytes);
  bool read_some(ReplyReader& reader, std::string& body);

  const HttpUrl url;
  const HttpClientOptions options;
  const Fd cancel_event;
  Fd socket;
  bool kept = false;      // the socket has served a request already
  bool answered = false;  // bytes of the reply that is waited for have come
  bool excess = false;    // and more than the reply
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
      socket.reset();  // the rest of the reply would be read as the next one
      throw;
    }
    kept = end == End::kWhole && reader.keep_alive() && !excess;
    if (!kept) socket.reset();
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
    socket.reset();
  }
  kept = false;
  try {
    socket = connect_to(url.host, url.port, options.connect_timeout, cancel_event.get());
  } catch (const Error& e) {
    fail("{}: {}", name(), e.what());
  }
  return static_cast<bool>(socket);
}

HttpClient::State::End HttpClient::State::talk(std::string_view bytes, ReplyReader& reader, std::string& body,
                                               const OnData* on_data) {
  using Stage = ReplyReader::Stage;
  answered = excess = false;
  bool broken = false;
  while (true) {
    const short ready = wait(bytes.empty() || broken ? POLLIN : POLLIN | POLLOUT);
    if (ready == 0) return End::kStopped;
    // A server may refuse a request before it has read all of it; its reply counts, not the failed write.
    if (ready & POLLOUT && !bytes.empty() && !write_some(bytes)) broken = true;
    if (!(ready & ~POLLOUT)) continue;
    if (!read_some(reader, body) && !answered && kept) return End::kStale;
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
short HttpClient::State::wait(short events) {
  std::array<pollfd, 2> both = {pollfd{socket.get(), events, 0}, pollfd{cancel_event.get(), POLLIN, 0}};
  const auto timeout = std::min<int64_t>(options.read_timeout.count(), 1 << 30);
  while (true) {
    const int n = poll(both.data(), both.size(), static_cast<int>(timeout));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("{}: {}", name(), error_name(errno));
    if (n == 0) fail("{}: no answer within {} ms", name(), options.read_timeout.count());
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
    reader.close();
    return false;
  }
  answered = true;
  std::string_view bytes(buffer.data(), static_cast<size_t>(n));
  reader.push(bytes, body);
  excess = !bytes.empty();
  return true;
}

HttpClient::HttpClient(HttpUrl url, HttpClientOptions options)
    : state_(std::make_unique<State>(std::move(url), options)) {}
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

}  // namespace kt
