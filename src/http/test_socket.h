// A bare TCP client for tests: bytes in, bytes out, nothing of HTTP.
#pragma once
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <array>
#include <string>
#include <string_view>

#include "http/socket.h"

namespace kt::inline http {

class TestSocket {
 public:
  // Reads give up after `seconds`.
  explicit TestSocket(int port, int seconds = 300) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    timeval limit{.tv_sec = seconds, .tv_usec = 0};
    setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    sockaddr_in where{};
    where.sin_family = AF_INET;
    where.sin_port = htons(static_cast<uint16_t>(port));
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(fd_.get(), reinterpret_cast<sockaddr*>(&where), sizeof where) == 0;
  }

  bool connected() const { return connected_; }
  int fd() const { return fd_.get(); }
  // False if the connection did not take all of it.
  bool write(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(n));
    }
    return true;
  }
  // What has been read ends with, or holds, `what`; or the connection ends first.
  const std::string& read_until(std::string_view what) {
    while (got_.find(what) == std::string::npos && read_once()) {
    }
    return got_;
  }
  const std::string& read_all() {
    while (read_once()) {
    }
    return got_;
  }
  bool ended() const { return ended_; }  // by the other side; not by a timeout or a reset
  void forget() { got_.clear(); }
  void half_close() { shutdown(fd_.get(), SHUT_WR); }
  void close() { fd_.reset(); }

 private:
  bool read_once() {
    std::array<char, 16384> buffer;
    const ssize_t n = recv(fd_.get(), buffer.data(), buffer.size(), 0);
    if (n == 0) ended_ = true;
    if (n <= 0) return false;
    got_.append(buffer.data(), static_cast<size_t>(n));
    return true;
  }

  Fd fd_;
  bool connected_ = false, ended_ = false;
  std::string got_;
};

}  // namespace kt::inline http
