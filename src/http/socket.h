// Sockets as owned values, and the two ways to get them: listen and connect. Knows nothing of HTTP.
#pragma once
#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kt::inline http {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }
  void reset() noexcept;
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

std::string error_name(int number);                           // of errno, in no locale
std::string address_text(const std::string& host, int port);  // "[::1]:80"
std::string peer_text(int socket);                            // the other side's address so; "-" if unknown

// Non-blocking sockets that listen on every address of the host, all on one port. Error(kInput) that names
// the address.
struct Listeners {
  std::vector<Fd> sockets;
  int port;
  bool only_loopback = true;  // no other machine can connect
};
Listeners listen_on(const std::string& host, int port);

// A non-blocking, connected socket; an empty one if `cancel_fd` became readable first. Error(kInput) that
// says why there is none, without the address.
Fd connect_to(const std::string& host, int port, std::chrono::milliseconds timeout, int cancel_fd);

void set_no_delay(int socket);
// The kernel asks an idle peer every few seconds whether it is there; one that is not becomes an error of the socket.
void watch_peer(int socket);

}  // namespace kt::inline http
