#include "http/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <string_view>
#include <system_error>

#include "base/error.h"

namespace kt::inline http {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;
using Clock = std::chrono::steady_clock;

Addresses resolve(const std::string& host, int port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string service = std::to_string(port);
  const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(), service.c_str(), &hints, &found);
  if (error != 0) fail("there is no host \"{}\": {}", host, gai_strerror(error));
  return {found, &freeaddrinfo};
}

// errno of the first step that failed, 0 for none.
int listen_at(const addrinfo& address, int port, bool only_v6, Fd& out) {
  Fd socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return errno;
  const int on = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_storage where{};
  std::memcpy(&where, address.ai_addr, address.ai_addrlen);
  const auto wire_port = htons(static_cast<uint16_t>(port));
  if (address.ai_family == AF_INET6) {
    const int only = only_v6 ? 1 : 0;
    setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only);
    reinterpret_cast<sockaddr_in6&>(where).sin6_port = wire_port;
  } else {
    reinterpret_cast<sockaddr_in&>(where).sin_port = wire_port;
  }
  if (bind(socket.get(), reinterpret_cast<sockaddr*>(&where), address.ai_addrlen) != 0) return errno;
  if (listen(socket.get(), SOMAXCONN) != 0) return errno;
  out = std::move(socket);
  return 0;
}

int port_of(int socket) {
  sockaddr_storage where{};
  socklen_t size = sizeof where;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&where), &size) != 0) return 0;
  return ntohs(where.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(where).sin6_port
                                           : reinterpret_cast<sockaddr_in&>(where).sin_port);
}

bool is_loopback(const sockaddr& address) {
  if (address.sa_family == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == IN_LOOPBACKNET);
}

[[noreturn]] void fail_to_listen(const std::string& host, int port, int error) {
  const std::string where = address_text(host, port);
  if (error == EADDRINUSE)
    fail("{}: address already in use; another server runs there, or choose another `port`", where);
  if (error == EACCES)
    fail("{}: permission denied; ports below 1024 are for root, choose another `port`", where);
  if (error == EADDRNOTAVAIL)
    fail("{}: this machine does not have that address; 127.0.0.1, 0.0.0.0 and :: always work", where);
  fail("{}: cannot listen: {}", where, error_name(error));
}

// Waits until the socket is connected: 0, or errno; ECANCELED if cancel_fd became readable.
int finish_connect(int socket, Clock::time_point deadline, int cancel_fd) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return ETIMEDOUT;
    std::array<pollfd, 2> wait = {pollfd{socket, POLLOUT, 0}, pollfd{cancel_fd, POLLIN, 0}};
    const int n = poll(wait.data(), wait.size(), static_cast<int>(std::min<int64_t>(left, 1 << 30)));
    if (n < 0 && errno != EINTR) return errno;
    if (n <= 0) continue;
    if (wait[1].revents != 0) return ECANCELED;
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size);
    return error;
  }
}

}  // namespace

void Fd::reset() noexcept {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

std::string error_name(int number) { return std::generic_category().message(number); }

std::string address_text(const std::string& host, int port) {
  return host.find(':') == std::string::npos ? text("{}:{}", host, port) : text("[{}]:{}", host, port);
}

std::string peer_text(int socket) {
  sockaddr_storage where{};
  socklen_t size = sizeof where;
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  auto* const address = reinterpret_cast<sockaddr*>(&where);
  if (getpeername(socket, address, &size) != 0 ||
      getnameinfo(address, size, host.data(), host.size(), port.data(), port.size(),
                  NI_NUMERICHOST | NI_NUMERICSERV))
    return "-";
  const std::string_view digits = port.data();
  int number = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return address_text(host.data(), number);
}

Listeners listen_on(const std::string& host, int port) {
  if (port < 0 || port > 65535) fail("`port` {}: expected 0 to 65535", port);
  const Addresses found = resolve(host, port, AI_PASSIVE);
  const bool only_v6 = found->ai_next != nullptr;
  // A free port on one address may be taken on the next: then another one is drawn.
  constexpr int kTries = 16;
  int error = EADDRNOTAVAIL;
  for (int i = 0; i < (port == 0 ? kTries : 1); ++i) {
    Listeners made{.sockets = {}, .port = port};
    for (const addrinfo* a = found.get(); a != nullptr; a = a->ai_next) {
      Fd socket;
      error = listen_at(*a, made.port, only_v6, socket);
      if (error == EADDRINUSE || error == EACCES) break;
      if (error != 0) continue;  // a name may have an IPv6 address on a machine that has no IPv6
      made.port = port_of(socket.get());
      made.only_loopback = made.only_loopback && is_loopback(*a->ai_addr);
      made.sockets.push_back(std::move(socket));
    }
    if (error == EADDRINUSE || error == EACCES) continue;
    if (!made.sockets.empty()) return made;
  }
  fail_to_listen(host, port, error);
}

Fd connect_to(const std::string& host, int port, std::chrono::milliseconds timeout, int cancel_fd) {
  const Addresses found = resolve(host, port, 0);
  const Clock::time_point deadline = Clock::now() + timeout;
  int error = 0;
  for (const addrinfo* a = found.get(); a != nullptr; a = a->ai_next) {
    Fd socket(::socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket) {
      error = errno;
      continue;
    }
    error = connect(socket.get(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) error = finish_connect(socket.get(), deadline, cancel_fd);
    if (error == ECANCELED) return Fd();
    if (error != 0) continue;
    set_no_delay(socket.get());
    return socket;
  }
  if (error == ECONNREFUSED) fail("connection refused; is the server running?");
  if (error == ETIMEDOUT) fail("no answer within {} ms", timeout.count());
  fail("cannot connect: {}", error_name(error));
}

void set_no_delay(int socket) {
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void watch_peer(int socket) {
  const auto set = [&](int level, int name, int value) {
    setsockopt(socket, level, name, &value, sizeof value);
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 6);
}

}  // namespace kt::inline http
