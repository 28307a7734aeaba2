#include "bench/server_load.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "bench/measure.h"
#include "bench/stream_event.h"
#include "http/parser.h"

namespace kt::inline bench {
namespace {

constexpr HttpLimits kReplyLimits{.body = size_t{1} << 40};  // nothing is kept of a stream
constexpr double kTick = 0.05;         // seconds between looks at the clock for timeouts
constexpr double kProbePause = 0.005;  // least time between two probes

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

struct Address {
  sockaddr_storage bytes{};
  socklen_t size = 0;
};

Address address_of(const HttpUrl& url) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int error = ::getaddrinfo(url.host.c_str(), std::to_string(url.port).c_str(), &hints, &found);
  if (error) fail("{}:{}: {}", url.host, url.port, ::gai_strerror(error));
  // A name may have addresses where nobody listens, such as ::1 beside 127.0.0.1: the first that connects.
  const addrinfo* best = found;
  for (const addrinfo* at = found; found->ai_next && at; at = at->ai_next) {
    const int probe = ::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol);
    const bool connects = probe >= 0 && ::connect(probe, at->ai_addr, at->ai_addrlen) == 0;
    if (probe >= 0) ::close(probe);
    if (!connects) continue;
    best = at;
    break;
  }
  Address out;
  std::memcpy(&out.bytes, best->ai_addr, best->ai_addrlen);
  out.size = best->ai_addrlen;
  ::freeaddrinfo(found);
  return out;
}

// One client: a connection, and the request that runs on it.
struct Client {
  Descriptor socket;
  std::unique_ptr<TlsSession> tls;  // on the socket; null: none
  std::string request;              // head and body
  std::string out;                  // bytes of the wire
  size_t sent = 0;                  // of those
  ReplyReader reader{kReplyLimits, "POST"};
  SseReader events;
  std::string body;  // what came and is not read yet; all of it when it is no stream
  StreamOutcome outcome;
  bool running = false, wants_out = false, is_probe = false;
  bool fresh = false;     // the connection was made for this request
  bool asked = false;     // the request is in `out`
  bool finished = false;  // [DONE] came
  double first_byte = 0;

  int status() const {  // 0: no head came, or the reply is broken
    const auto stage = reader.stage();
    return stage == ReplyReader::Stage::kHead || stage == ReplyReader::Stage::kFailed ? 0
                                                                                      : reader.reply().status;
  }
  bool streams() const { return status() == 200 && reader.reply().type.starts_with("text/event-stream"); }
  bool ended() const {
    return reader.stage() == ReplyReader::Stage::kDone || reader.stage() == ReplyReader::Stage::kFailed;
  }
};

class Loop {
 public:
  explicit Loop(const LoadTarget& target)
      : target_(target),
        trust_(target.url.secure && !target.trust ? std::make_shared<TlsTrust>() : target.trust),
        address_(address_of(target.url)),
        epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    KT_CHECK(epoll_, "epoll_create1: {}", std::strerror(errno));
  }

  std::vector<Client> clients;
  std::function<void(Client&)> on_end;         // the request of a client ended; may begin the next one
  std::function<void(Client&)> on_first_byte;  // of a reply

  void begin(Client& client, std::string_view body);
  // Ends when no client runs and `pending` (seconds until something is to begin; negative: nothing) is
  // negative.
  void run(const std::function<double()>& pending);
  void stop() { stopped_ = true; }

 private:
  void open(Client& client);
  void ask(Client& client);
  void write(Client& client);
  void read(Client& client);
  bool read_tls(Client& client, std::string_view& bytes);
  void closed(Client& client);
  void take_events(Client& client, double now);
  void end(Client& client, std::string failure);
  void watch(Client& client, int operation);
  void check_deadlines(double now);

  const LoadTarget& target_;
  const std::shared_ptr<const TlsTrust> trust_;
  Address address_;
  Descriptor epoll_;
  std::array<char, 64 << 10> buffer_{};
  std::string plain_;  // what bytes of the wire meant
  double next_look_ = 0;
  bool stopped_ = false;
};

void Loop::watch(Client& client, int operation) {
  epoll_event event{};
  event.events = client.wants_out ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.u64 = static_cast<uint64_t>(&client - clients.data());
  ::epoll_ctl(epoll_.get(), operation, client.socket.get(), &event);
}

void Loop::open(Client& client) {
  client.fresh = true;
  client.socket =
      Descriptor(::socket(address_.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!client.socket) return end(client, text("socket: {}", std::strerror(errno)));
  const int on = 1;
  ::setsockopt(client.socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  const int made =
      ::connect(client.socket.get(), reinterpret_cast<const sockaddr*>(&address_.bytes), address_.size);
  if (made != 0 && errno != EINPROGRESS) return end(client, text("connect: {}", std::strerror(errno)));
  client.tls.reset();
  client.out.clear();
  client.sent = 0;
  client.asked = false;
  if (target_.url.secure) {
    client.tls = trust_->session(target_.url.host);
    client.tls->receive({}, plain_, client.out);
  } else {
    ask(client);
  }
  client.wants_out = true;
  watch(client, EPOLL_CTL_ADD);
}

void Loop::ask(Client& client) {
  client.asked = true;
  if (client.tls)
    client.tls->seal(client.request, client.out);
  else
    client.out = client.request;
}

void Loop::begin(Client& client, std::string_view body) {
  const HttpUrl& url = target_.url;
  const std::string host = url.host.find(':') == std::string::npos ? url.host : text("[{}]", url.host);
  client.request =
      text("POST {}{} HTTP/1.1\r\nHost: {}:{}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n",
           url.path, target_.path, host, url.port, body.size());
  if (!target_.api_key.empty()) client.request += text("Authorization: Bearer {}\r\n", target_.api_key);
  client.request += client.is_probe ? "Connection: close\r\n\r\n" : "Accept: text/event-stream\r\n\r\n";
  client.request += body;
  client.out.clear();
  client.sent = 0;
  client.reader = ReplyReader(kReplyLimits, "POST");
  client.events = {};
  client.body.clear();
  client.outcome = {.start = now_seconds()};
  client.running = true;
  client.finished = false;
  client.first_byte = 0;
  if (!client.socket) return open(client);
  client.fresh = false;
  ask(client);
  write(client);
}

void Loop::write(Client& client) {
  while (client.sent < client.out.size()) {
    const ssize_t n = ::send(client.socket.get(), client.out.data() + client.sent,
                             client.out.size() - client.sent, MSG_NOSIGNAL);
    if (n >= 0) {
      client.sent += static_cast<size_t>(n);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN) break;
    // A server may answer before it has read all (413) and close; what it said is still to be read.
    if (errno == EPIPE || errno == ECONNRESET) {
      client.sent = client.out.size();
      break;
    }
    return end(client, text("connect: {}", std::strerror(errno)));
  }
  const bool wants = client.sent < client.out.size();
  if (wants == client.wants_out) return;
  client.wants_out = wants;
  watch(client, EPOLL_CTL_MOD);
}

void Loop::read(Client& client) {
  const ssize_t n = ::recv(client.socket.get(), buffer_.data(), buffer_.size(), 0);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (!client.running) return client.socket.reset();  // the server closed an idle connection
  if (n < 0 && client.fresh && client.sent == 0)
    return end(client, text("connect: {}", std::strerror(errno)));
  if (n <= 0) return closed(client);
  std::string_view bytes(buffer_.data(), static_cast<size_t>(n));
  if (client.tls && !read_tls(client, bytes)) return;
  const double now = now_seconds();
  if (client.first_byte == 0) {
    client.first_byte = now;
    if (on_first_byte) on_first_byte(client);
  }
  client.reader.push(bytes, client.body);
  if (client.streams()) take_events(client, now);
  if (client.reader.stage() == ReplyReader::Stage::kDone && !bytes.empty())
    return end(client, "bytes after the end of the reply");
  if (client.ended()) return end(client, client.reader.failure().why);
  if (client.tls && client.tls->ended()) closed(client);
}

// Makes of bytes of the wire what they mean; false where that is nothing to read now.
bool Loop::read_tls(Client& client, std::string_view& bytes) {
  plain_.clear();
  client.tls->receive(bytes, plain_, client.out);
  if (!client.tls->failure().empty()) {
    end(client, client.tls->failure());
    return false;
  }
  if (client.tls->open() && !client.asked) ask(client);
  if (client.sent < client.out.size()) write(client);
  bytes = plain_;
  if (!client.running) return false;
  if (bytes.empty() && client.tls->ended()) closed(client);
  return !bytes.empty();
}

void Loop::closed(Client& client) {
  // A kept connection that the server closed meanwhile: the request never ran.
  if (!client.fresh && client.first_byte == 0) {
    client.socket.reset();
    return open(client);
  }
  client.reader.close();
  end(client, client.reader.failure().why);
}

void Loop::take_events(Client& client, double now) {
  StreamOutcome& outcome = client.outcome;
  for (const std::string& data : client.events.push(client.body)) {
    const StreamEvent event = read_stream_event(data);
    if (event.done) client.finished = true;
    if (!event.error.empty()) outcome.failure = text("error event: {}", event.error);
    if (event.usage) {
      outcome.prompt_tokens = event.usage->prompt;
      outcome.tokens = event.usage->completion;
      outcome.counted = true;
    }
    if (event.has_text) ++outcome.pieces;
    // The piece that says why the answer ended may have no text, but the last token can be in it.
    if (event.has_text || (event.has_choice && outcome.first > 0)) {
      if (outcome.first == 0) outcome.first = now;
      if (outcome.last > 0) outcome.longest_gap = std::max(outcome.longest_gap, now - outcome.last);
      outcome.last = now;
    }
  }
  client.body.clear();
}

void Loop::end(Client& client, std::string failure) {
  StreamOutcome& outcome = client.outcome;
  outcome.end = now_seconds();
  client.running = false;
  if (client.reader.stage() != ReplyReader::Stage::kDone || !client.reader.keep_alive() || !failure.empty() ||
      client.is_probe)
    client.socket.reset();
  if (failure.empty() && client.status() != 200)
    failure = text("HTTP {}: {}", client.status(), error_message(client.body));
  else if (failure.empty() && !client.streams())
    failure = "a reply that is no event stream";
  else if (failure.empty() && !client.finished && outcome.failure.empty())
    failure = "a stream without [DONE]";
  if (outcome.failure.empty()) outcome.failure = std::move(failure);
  if (!outcome.counted) outcome.tokens = outcome.pieces;
  if (outcome.first == 0) outcome.first = outcome.last = outcome.end;
  if (on_end) on_end(client);
}

void Loop::check_deadlines(double now) {
  if (now < next_look_) return;
  next_look_ = now + kTick;
  for (Client& client : clients)
    if (client.running && now - client.outcome.start > target_.timeout)
      end(client, text("no end within {} s", target_.timeout));
}

void Loop::run(const std::function<double()>& pending) {
  std::array<epoll_event, 256> events{};
  const auto busy = [&] { return std::ranges::any_of(clients, &Client::running); };
  while (!stopped_) {
    const double wait = pending();
    if (wait < 0 && !busy()) return;
    const double limit = wait < 0 ? kTick : std::min(wait, kTick);
    const int n = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                               static_cast<int>(std::ceil(1000 * limit)));
    for (int i = 0; i < n; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      Client& client = clients[static_cast<size_t>(event.data.u64)];
      if (client.socket && client.wants_out && (event.events & EPOLLOUT)) write(client);
      if (client.socket && (event.events & (EPOLLIN | EPOLLHUP | EPOLLERR))) read(client);
    }
    check_deadlines(now_seconds());
  }
}

}  // namespace

StreamsResult run_streams(const LoadTarget& target, int streams, const NextBody& next) {
  StreamsResult result;
  Loop loop(target);
  loop.clients.resize(static_cast<size_t>(streams));
  std::vector<Client*> idle;
  // Not begun from inside on_end: a request that fails at once would nest once for each request.
  loop.on_end = [&](Client& client) {
    result.requests.push_back(std::move(client.outcome));
    idle.push_back(&client);
  };
  for (Client& client : loop.clients) idle.push_back(&client);
  const double cpu = cpu_seconds();
  result.start = now_seconds();
  bool more = true;
  loop.run([&]() -> double {
    while (more && !idle.empty()) {
      const std::optional<std::string> body = next();
      more = body.has_value();
      if (!more) break;
      Client& client = *idle.back();
      idle.pop_back();
      loop.begin(client, *body);
    }
    return -1;
  });
  result.end = now_seconds();
  result.cpu_seconds = cpu_seconds() - cpu;
  return result;
}

ProbeResult probe_errors(const LoadTarget& target, int streams, const NextBody& next, int count) {
  ProbeResult result;
  Loop loop(target);
  loop.clients.resize(static_cast<size_t>(streams) + 1);
  Client& probe = loop.clients.back();
  probe.is_probe = true;
  std::vector<Client*> idle;
  std::vector<bool> seen(loop.clients.size());
  int done = 0, warm = 0;
  double due = 0;
  for (Client& client : loop.clients)
    if (!client.is_probe) idle.push_back(&client);
  const auto mark = [&](Client& client) {
    const auto at = static_cast<size_t>(&client - loop.clients.data());
    if (!client.is_probe && !seen[at]) seen[at] = true, ++warm;
  };
  loop.on_first_byte = mark;
  loop.on_end = [&](Client& client) {
    mark(client);
    if (!client.is_probe) {
      if (client.outcome.failure.empty()) return idle.push_back(&client);
      ++result.streams_failed;
      return;
    }
    ++done;
    const int status = client.status();
    if (client.first_byte > 0 && status >= 400 && status < 500)
      result.seconds.push_back(client.first_byte - client.outcome.start);
    else
      ++result.failures[status ? text("HTTP {}", status) : client.outcome.failure];
    // Not a multiple of anything the server does: the pause wanders through the phases of its steps.
    due = now_seconds() + kProbePause * (1 + 0.618034 * (done % 8) / 8);
  };
  loop.run([&]() -> double {
    for (; !idle.empty(); idle.pop_back()) {
      const std::optional<std::string> body = next();
      if (!body) break;
      loop.begin(*idle.back(), *body);
    }
    if (done >= count || result.streams_failed == streams) {
      loop.stop();
      return -1;
    }
    if (warm < streams || probe.running) return kTick;
    const double wait = due - now_seconds();
    if (wait > 0) return wait;
    loop.begin(probe, "{\"model\": ");
    return kTick;
  });
  return result;
}

}  // namespace kt::inline bench
